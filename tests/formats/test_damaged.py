"""A damaged or foreign checkpoint loads nothing, and each kind is told apart by its message."""

import json
import pickle
import re

import pytest
import torch

from eaglelab.formats import import_drafter
from tests.formats.conftest import Published

EAGLE, EAGLE3 = "eagle2_draft_d3k4t16_s0", "eagle3_draft_d3k4t16_s0"


class Code:
    def __reduce__(self):
        return print, ("this ran",)


def wrong_shape(p, folder):
    p.tensors["layers.0.mlp.up_proj.weight"] = p.tensors["layers.0.mlp.up_proj.weight"][:60]


def missing_head(p, folder):
    del p.tensors["lm_head.weight"]


def absolute_d2t(p, folder):
    p.tensors["d2t"] = p.tensors["d2t"] + torch.arange(40)


def nan_weights(p, folder):
    p.tensors["midlayer.self_attn.k_proj.weight"][3, 4] = float("nan")


def wrong_hidden_size(p, folder):
    p.config["hidden_size"] = 64


def unknown_architecture(p, folder):
    p.config["architectures"] = ["MedusaModel"]


def swapped_fc(p, folder):
    p.tensors["fc.weight"] = torch.zeros(32, 96)


def other_vocabulary(p, folder):
    p.config["vocab_size"] = 120


def truncated(p, folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickle_with_code(p, folder):
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Code()}, folder / "pytorch_model.bin")


# damage to the content, or to the files after they were written
DAMAGES = [
    (EAGLE, wrong_shape, r"layers\.0\.mlp\.up_proj\.weight has shape \(60, 32\), config\.json asks for \(64, 32\)"),
    (EAGLE3, missing_head, r"lacks lm_head\.weight; an EAGLE-3 drafter brings its own head"),
    (EAGLE3, absolute_d2t, r"d2t holds absolute target ids.*subtract arange"),
    (EAGLE3, nan_weights, r"midlayer\.self_attn\.k_proj\.weight holds NaN or infinite values"),
    (EAGLE, truncated, r"model\.safetensors is truncated or no safetensors file"),
    (EAGLE3, wrong_hidden_size, r"has hidden_size=64, the target .* has 32; a drafter is as wide as its target"),
    (EAGLE, unknown_architecture, r"unknown architecture MedusaModel"),
    (EAGLE, pickle_with_code, r"pytorch_model\.bin is a pickle that wants to run code"),
    (EAGLE, swapped_fc, r"fc\.weight has shape \(32, 96\).* fuses three streams as EAGLE-3 does"),
    (EAGLE3, other_vocabulary, r"drafts for a vocabulary of 120 tokens, the target .* has 97"),
]


def damaged(case, damage, folder):
    published = Published(case)
    if damage in (truncated, pickle_with_code):
        damage(published, published.write(folder))
    else:
        damage(published, folder)
        published.write(folder)
    return folder


@pytest.fixture
def target_of(eagle_target, eagle3_target):
    return {EAGLE: eagle_target, EAGLE3: eagle3_target}


@pytest.mark.parametrize(("case", "damage", "message"), DAMAGES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_damage_is_named_and_nothing_is_loaded(case, damage, message, target_of, tmp_path, capfd):
    source = damaged(case, damage, tmp_path / "published")
    with pytest.raises(ValueError, match=message):
        import_drafter(source, target_of[case], tmp_path / "run", trust=["target"])
    assert [path.name for path in tmp_path.iterdir()] == ["published"]  # no run folder
    assert "this ran" not in capfd.readouterr().out


def test_every_damage_has_its_own_message(target_of, tmp_path):
    told = []
    for number, (case, damage, _) in enumerate(DAMAGES):
        source = damaged(case, damage, tmp_path / str(number))
        with pytest.raises(ValueError, match=".") as error:
            import_drafter(source, target_of[case], tmp_path / "run", trust=["target"])
        told.append(str(error.value))
    patterns = [message for _, _, message in DAMAGES]
    for message, own in zip(told, patterns, strict=True):
        assert [pattern for pattern in patterns if re.search(pattern, message)] == [own]
        assert message[-1] != ":" and "Traceback" not in message


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("no weights", lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors or pytorch_model.bin"),
        ("no config", lambda f: (f / "config.json").unlink(), "has no config.json; a drafter's folder has its shape"),
        ("no JSON", lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        ("a list", lambda f: (f / "config.json").write_text("[]"), "config.json holds a list, not an object"),
    ],
)
def test_files_that_are_not_there_or_no_json(name, change, message, eagle_target, tmp_path):
    source = Published(EAGLE).write(tmp_path / "published")
    change(source)
    with pytest.raises(ValueError, match=message):
        import_drafter(source, eagle_target, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda places: places.update({"fc.weight": "../model.safetensors"}),
            "shard '../model.safetensors', which is not",
        ),
        (lambda places: places.update({"norm.weight": "model-00001-of-00002.safetensors"}), "which no shard holds"),
        (lambda places: places.pop("fc.bias"), "holds fc.bias, which .* does not place there"),
        (lambda places: places.update(a="model-00003-of-00003.safetensors"), "shard 'model-00003-of-00003"),
    ],
)
def test_shards_are_all_there_and_nowhere_else(change, message, eagle_target, tmp_path):
    source = Published(EAGLE).write(tmp_path / "published", "sharded")
    index = source / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    change(places)
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=message):
        import_drafter(source, eagle_target, tmp_path / "run")


def test_a_plain_pickle_with_code(eagle_target, tmp_path, capfd):
    source = Published(EAGLE).write(tmp_path / "published", "bin")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Code()}))
    with pytest.raises(ValueError, match="pickle of more than tensors, which is not read"):
        import_drafter(source, eagle_target, tmp_path / "run")
    assert "this ran" not in capfd.readouterr().out


@pytest.mark.parametrize("size", [10, 4000])
def test_a_truncated_bin(size, eagle_target, tmp_path):
    source = Published(EAGLE).write(tmp_path / "published", "bin")
    (source / "pytorch_model.bin").write_bytes((source / "pytorch_model.bin").read_bytes()[:size])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is (truncated|damaged)"):
        import_drafter(source, eagle_target, tmp_path / "run")
