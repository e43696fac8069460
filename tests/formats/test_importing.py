"""What published drafters look like in practice, and what is made of each."""

import json

import pytest
import torch

from eaglelab.formats import export_drafter, import_drafter, read_drafter, training_overrides
from eaglelab.training.job import load_initial_weights, require_resumable
from eaglelab.training.run_folder import RunFolder
from eaglelab.variants import Eagle3Module, HassModule, OptimConfig
from tests.formats.conftest import Published, save_llama

EAGLE, EAGLE3 = "eagle2_draft_d3k4t16_s0", "eagle3_draft_d3k4t16_s0"


def write(tmp_path, case, config=None, tensors=None, store="safetensors"):
    """The case with keys of config.json and tensors changed (None takes one away)."""
    published = Published(case)
    published.config = {k: v for k, v in (published.config | (config or {})).items() if v is not None}
    published.tensors = {k: v for k, v in (published.tensors | (tensors or {})).items() if v is not None}
    return published.write(tmp_path / "published", store)


# ---- EAGLE-1 and HASS -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, True])
def test_bias_absent_means_true(bias, eagle_target, tmp_path):
    drafter = read_drafter(write(tmp_path, EAGLE, {"bias": bias}), eagle_target)
    assert drafter.config.fc_bias and "fc.bias" in drafter.weights
    assert (drafter.format, drafter.manifest.variant, drafter.manifest.taps) == ("eagle", "eagle", ("final",))


def test_without_bias(eagle_target, tmp_path):
    drafter = read_drafter(write(tmp_path, EAGLE, {"bias": False}, {"fc.bias": None}), eagle_target)
    assert not drafter.config.fc_bias and "fc.bias" not in drafter.weights


def test_bias_in_config_and_file_must_agree(eagle_target, tmp_path):
    with pytest.raises(ValueError, match="lacks fc.bias; if it was trained without one, write bias: false"):
        read_drafter(write(tmp_path / "a", EAGLE, None, {"fc.bias": None}), eagle_target)
    with pytest.raises(ValueError, match="holds fc.bias, which a drafter of format=eagle does not have; if it was"):
        read_drafter(write(tmp_path / "b", EAGLE, {"bias": False}), eagle_target)


def test_a_hass_checkpoint_says_so_by_hand(eagle_target, tmp_path):
    source = write(tmp_path, EAGLE)
    assert read_drafter(source, eagle_target, variant="hass").manifest.variant == "hass"
    with pytest.raises(ValueError, match="variant=eagle3 does not have the tensors of format=eagle; use eagle or hass"):
        read_drafter(source, eagle_target, variant="eagle3")


def test_extra_tensors_are_named(eagle_target, tmp_path):
    source = write(tmp_path, EAGLE, None, {"layers.0.input_layernorm.weight": torch.ones(32)})
    with pytest.raises(ValueError, match=r"holds layers\.0\.input_layernorm\.weight, which a drafter"):
        read_drafter(source, eagle_target)


def test_half_precision_and_its_rounding(eagle_target, tmp_path):
    published = Published(EAGLE)
    half = {name: value.half() for name, value in published.tensors.items()}
    drafter = read_drafter(write(tmp_path, EAGLE, None, half), eagle_target)
    assert all(value.dtype == torch.float32 for value in drafter.weights.values())
    assert "embedding: equal to the target's, to rounding" in drafter.notes


# ---- the target ---------------------------------------------------------------------------------------------------


def test_an_embedding_that_is_not_the_targets(eagle_target, tmp_path):
    table = Published(EAGLE).tensors["embed_tokens.weight"].clone()
    table[5, 1] += 0.1
    source = write(tmp_path, EAGLE, None, {"embed_tokens.weight": table})
    with pytest.raises(ValueError, match=r"1 of 97 rows of embed_tokens.weight differ.*say trust=embedding"):
        import_drafter(source, eagle_target, tmp_path / "run", trust="target")
    assert not (tmp_path / "run").exists()
    drafter = read_drafter(source, eagle_target, trust=["target", "embedding"])
    assert any("the target's is used, as trust=embedding said" in note for note in drafter.notes)


def test_without_an_embedding_the_target_is_taken_on_trust(eagle3_target, tmp_path):
    source = write(tmp_path, EAGLE3, None, {"embed_tokens.weight": None})
    with pytest.raises(ValueError, match="nothing in the files tells which target.*Say trust=target"):
        import_drafter(source, eagle3_target, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    import_drafter(source, eagle3_target, tmp_path / "run", trust="target")
    manifest = RunFolder(tmp_path / "run").manifest()
    assert manifest.switches["target_revision"] == manifest.switches["objective"] == "unknown"
    assert "taken on trust" in RunFolder(tmp_path / "run").read_metrics()["imported"]["notes"][-1]
    with pytest.raises(ValueError, match="trust='targets' is not one of target, embedding"):
        read_drafter(source, eagle3_target, trust="targets")


def test_a_narrower_drafter_than_its_target(eagle3_target, tmp_path):
    with pytest.raises(ValueError, match="has target_hidden_size=64, the target .* has 32"):
        read_drafter(write(tmp_path, EAGLE3, {"target_hidden_size": 64}), eagle3_target)
    assert read_drafter(write(tmp_path / "same", EAGLE3, {"target_hidden_size": 32}), eagle3_target)


def test_a_target_without_room_for_the_taps(tmp_path):
    published = Published(EAGLE3)
    from eaglelab.target import FrozenTarget

    shallow = FrozenTarget.load(
        save_llama(tmp_path / "shallow", embedding=published.golden["w.embed_tokens.weight"], num_hidden_layers=4)
    )
    source = published.write(tmp_path / "published")
    with pytest.raises(ValueError, match=r"a target of 4 layers has no three distinct default taps.*taps=\[0, 2, 3\]"):
        read_drafter(source, shallow)
    assert read_drafter(source, shallow, taps=[0, 2, 3]).manifest.taps == (0, 2, 3)
    with pytest.raises(ValueError, match="tap 7 is not a feature address of a target with 4 layers"):
        read_drafter(source, shallow, taps=[0, 2, 7])


# ---- EAGLE-3 ----------------------------------------------------------------------------------------------------


def specforge():
    """As SpecForge saves it: no embedding, and its own tied-head key although the head is in the file."""
    return {"tie_word_embeddings": True, "head_dim": 8, "rope_scaling": None}, {"embed_tokens.weight": None}


def renamed(prefix):
    tensors = Published(EAGLE3).tensors
    gone = {name: None for name in tensors if name.startswith("midlayer.")}
    return gone | {n.replace("midlayer.", prefix): v for n, v in tensors.items() if n.startswith("midlayer.")}


def test_specforge_and_the_other_name_of_the_layer(eagle3_target, tmp_path):
    config, tensors = specforge()
    drafter = read_drafter(write(tmp_path / "a", EAGLE3, config, tensors), eagle3_target, trust="target")
    other = read_drafter(
        write(tmp_path / "b", EAGLE3, config, tensors | renamed("layers.0.")), eagle3_target, trust="target"
    )
    assert drafter.manifest == other.manifest
    assert all(torch.equal(value, other.weights[name]) for name, value in drafter.weights.items())
    both = write(tmp_path / "c", EAGLE3, config, {"layers.0.hidden_norm.weight": torch.ones(32)})
    with pytest.raises(ValueError, match=r"the decoder layer twice, as midlayer\.\* and layers\.0"):
        read_drafter(both, eagle3_target, trust="target")


def speculators_config(**changes):
    layer = {k: v for k, v in Published(EAGLE3).config.items() if k not in ("architectures", "draft_vocab_size")}
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 8}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 40,
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
    }
    return {name: None for name in layer} | config | changes


def test_speculators(eagle3_target, tmp_path):
    source = write(
        tmp_path, EAGLE3, speculators_config(eagle_aux_hidden_state_layer_ids=[1, 3, 6]), renamed("layers.0.")
    )
    drafter = read_drafter(source, eagle3_target)  # its embedding is the target's: nothing to trust
    assert drafter.format == "speculators"
    assert drafter.manifest.taps == (1, 3, 6)
    assert "variant.taps=[1,3,6]" in training_overrides(drafter, eagle3_target)
    assert drafter.config.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": None}, "does not say norm_before_residual, and readers disagree"),
        ({"norm_before_residual": True}, "norm_before_residual=true; a drafter of that kind cannot be read"),
        ({"norm_before_fc": True}, "norm_before_fc=true"),
        ({"speculators_model_type": "dflash"}, "a speculators model of type 'dflash'; only eagle3"),
        ({"draft_vocab_size": 400}, "draft_vocab_size=400; it must lie between 1 and 97"),
    ],
)
def test_speculators_that_cannot_be_read(changes, message, eagle3_target, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_drafter(write(tmp_path, EAGLE3, speculators_config(**changes), renamed("layers.0.")), eagle3_target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 2}, "only drafters of one decoder layer"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not one of"),
        ({"intermediate_size": None}, "intermediate_size=None; a drafter's config gives it as a number"),
        ({"norm_before_residual": True}, "norm_before_residual=true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=false"),
        ({"model_type": "gpt_oss"}, "unknown architecture gpt_oss"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4"}, "it must be a list of layers"),
    ],
)
def test_layers_that_cannot_be_read(config, message, eagle3_target, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_drafter(write(tmp_path, EAGLE3, config), eagle3_target)


def test_an_unknown_name_of_the_same_layer_can_be_said(eagle3_target, tmp_path):
    source = write(tmp_path, EAGLE3, {"architectures": ["MyEagle3"]})
    with pytest.raises(ValueError, match="unknown architecture MyEagle3.*format=eagle3"):
        read_drafter(source, eagle3_target)
    assert read_drafter(source, eagle3_target, format="eagle3").manifest.variant == "eagle3"


NESTED = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "asked", "taps"),
    [
        ({}, None, (2, 4, 5)),
        ({NESTED: [1, 3, 6]}, None, (1, 3, 6)),
        ({NESTED: [1, 3, 6], "eagle_config": {NESTED: [0, 2, 5]}}, None, (1, 3, 6)),
        ({"eagle_config": {NESTED: [1, 3, 4]}}, None, (2, 4, 5)),  # SGLang's count of the published taps
        ({"eagle_config": {NESTED: [2, 4, 5]}}, None, (2, 4, 5)),  # vLLM's
        ({"eagle_config": {NESTED: [1, 3, 6]}}, None, None),
        ({"eagle_config": {NESTED: [1, 3, 6]}}, [2, 4, 7], (2, 4, 7)),
    ],
)
def test_taps_by_each_writers_count(config, asked, taps, eagle3_target, tmp_path):
    source = write(tmp_path, EAGLE3, config)
    if taps is None:
        with pytest.raises(ValueError, match=r"say which with taps=\[1, 3, 6\] or taps=\[2, 4, 7\]"):
            read_drafter(source, eagle3_target)
    else:
        assert read_drafter(source, eagle3_target, taps=asked).manifest.taps == taps


def test_streams_out_of_order(eagle3_target, tmp_path):
    source = write(tmp_path, EAGLE3, {NESTED: [6, 1, 3]})
    with pytest.raises(ValueError, match=r"lists the streams \[6, 1, 3\] out of order"):
        read_drafter(source, eagle3_target)
    assert read_drafter(source, eagle3_target, taps=[6, 1, 3]).manifest.taps == (6, 1, 3)


def test_whole_vocabulary_with_and_without_maps(eagle3_target, tmp_path):
    head = {"lm_head.weight": torch.randn(97, 32)}
    identity = {"d2t": torch.zeros(97, dtype=torch.int64), "t2d": torch.ones(97, dtype=torch.bool)}
    for number, (size, maps) in enumerate(
        [(97, identity), (97, {"d2t": None, "t2d": None}), (None, {"d2t": None, "t2d": None})]
    ):
        source = write(tmp_path / str(number), EAGLE3, {"draft_vocab_size": size}, head | maps)
        drafter = read_drafter(source, eagle3_target)
        assert drafter.config.draft_vocab_size is None and "d2t" not in drafter.weights
    source = write(
        tmp_path / "wrong", EAGLE3, {"draft_vocab_size": 97}, head | identity | {"d2t": torch.ones(97).long()}
    )
    with pytest.raises(ValueError, match="d2t or t2d leaves tokens out"):
        read_drafter(source, eagle3_target)


def test_maps_of_two_heads_mixed_up(eagle3_target, tmp_path):
    t2d = Published(EAGLE3).tensors["t2d"].roll(1)
    with pytest.raises(ValueError, match="d2t and t2d disagree"):
        read_drafter(write(tmp_path / "a", EAGLE3, None, {"t2d": t2d}), eagle3_target)
    with pytest.raises(ValueError, match="lacks t2d; a head over a draft vocabulary is useless without the map"):
        read_drafter(write(tmp_path / "b", EAGLE3, None, {"t2d": None}), eagle3_target)


def test_quantised_weights(eagle_target, tmp_path):
    with pytest.raises(ValueError, match=r"fc\.weight is torch\.int8; quantised drafters"):
        read_drafter(write(tmp_path, EAGLE, None, {"fc.weight": torch.zeros(32, 64, dtype=torch.int8)}), eagle_target)


# ---- where it lies -----------------------------------------------------------------------------------------------


def test_sources_that_are_no_folder(eagle_target, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for source, message in (
        (tmp_path / "nothing", "nothing does not exist; give a folder, or a hub id"),
        (tmp_path / "file", "is a file; give the folder"),
    ):
        with pytest.raises(ValueError, match=message):
            read_drafter(source, eagle_target)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"source='nobody/nothing' is no folder here, is not in the local hub cache"):
        read_drafter("nobody/nothing", eagle_target)


def test_a_whole_model_is_no_drafter(eagle_target):
    with pytest.raises(ValueError, match="holds a whole language model"):
        read_drafter(eagle_target.source, eagle_target)


# ---- what the run folder is good for ------------------------------------------------------------------------------


def counts(V=97):
    return torch.arange(V, 0, -1)


def test_an_imported_eagle_starts_a_hass_training(eagle_target, tmp_path):
    import_drafter(write(tmp_path, EAGLE), eagle_target, tmp_path / "run")
    module = HassModule(eagle_target, OptimConfig(lr=1e-3), drafter={"max_position_embeddings": 64})
    load_initial_weights(module, str(tmp_path / "run"))
    assert torch.equal(module.network.fc.weight, Published(EAGLE).tensors["fc.weight"])
    with pytest.raises(
        ValueError, match=r"no training to continue \(it was imported\); start from them with init_from"
    ):
        require_resumable(module, str(tmp_path / "run" / "checkpoints" / "last.ckpt"))


def test_an_imported_head_keeps_its_vocabulary_in_training(eagle3_target, tmp_path):
    drafter = import_drafter(write(tmp_path, EAGLE3), eagle3_target, tmp_path / "run")
    assert training_overrides(drafter, eagle3_target) == [
        "variant=eagle3",
        "variant.draft_vocab_size=40",
    ]
    module = Eagle3Module(eagle3_target, OptimConfig(lr=1e-3), draft_vocab_size=40, answer_counts=counts)
    chosen = module.draft_vocabulary.digest
    load_initial_weights(module, str(tmp_path / "run"))
    assert module.manifest().draft_vocabulary == drafter.manifest.draft_vocabulary != chosen
    assert torch.equal(module.network.d2t, Published(EAGLE3).tensors["d2t"])
    assert module.report["answer_token_coverage"] == module.draft_vocabulary.coverage(counts())
    other = Eagle3Module(eagle3_target, OptimConfig(lr=1e-3), draft_vocab_size=30, answer_counts=counts)
    with pytest.raises(ValueError, match="init_from=.* does not fit"):
        load_initial_weights(other, str(tmp_path / "run"))


def test_overrides_name_what_differs_from_the_targets_own_shape(eagle_target, tmp_path):
    source = write(
        tmp_path, EAGLE, {"rope_theta": 5000.0, "max_position_embeddings": 48, "bias": False}, {"fc.bias": None}
    )
    assert training_overrides(read_drafter(source, eagle_target), eagle_target) == [
        "variant=eagle",
        "variant.drafter.rope_parameters={rope_theta:5000.0,rope_type:default}",
        "variant.drafter.max_position_embeddings=48",
        "variant.drafter.fc_bias=False",
    ]


def test_a_foreign_drafter_goes_out_again_unchanged(eagle3_target, tmp_path):
    """Published weights through import and export: every tensor bit for bit, and once more the same bytes."""
    source = write(tmp_path, EAGLE3)
    import_drafter(source, eagle3_target, tmp_path / "run")
    out = export_drafter(RunFolder(tmp_path / "run"), "eagle3", tmp_path / "out", dtype="float32")
    from safetensors.torch import load_file

    tensors = load_file(out / "model.safetensors")
    published = Published(EAGLE3).tensors
    assert set(published) - set(tensors) == {"embed_tokens.weight"}
    assert all(torch.equal(value, published[name]) for name, value in tensors.items())
    assert "imported_from" in (out / "README.md").read_text()
    record = json.loads((out / "eaglelab.json").read_text())
    assert str(tmp_path) not in json.dumps(record)
    import_drafter(out, eagle3_target, tmp_path / "second")
    again = export_drafter(RunFolder(tmp_path / "second"), "eagle3", tmp_path / "again", dtype="float32")
    for file in out.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
