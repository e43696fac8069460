"""The fingerprint changes exactly when the target does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eaglelab.target import FrozenTarget, TargetFingerprint, fingerprint
from eaglelab.target.fingerprint import config_digest, tokenizer_digest, weights_digest
from tests.target.target_families import build
from tests.target.target_tokenizer import tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLELAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, name: str = "model.norm.weight") -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name][0] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_it_is_stable_and_independent_of_load_type_shards_and_place(folder: Path, tmp_path: Path) -> None:
    first = FrozenTarget.load(folder).fingerprint
    assert FrozenTarget.load(folder, dtype="bfloat16").fingerprint == first
    build("llama").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    again = FrozenTarget.load(tmp_path / "shards").fingerprint
    assert again.same_target(first)
    assert again != first  # it says where it was loaded from
    assert again.short == first.short
    assert len(first.weights) == len(first.config) == len(first.tokenizer) == 64
    assert TargetFingerprint.from_dict(json.loads(json.dumps(first.to_dict()))) == first


def test_memory_and_folder_agree_for_plain_models(folder: Path) -> None:
    in_memory = FrozenTarget(build("llama"), tiny_tokenizer()).fingerprint
    assert in_memory.same_target(FrozenTarget.load(folder).fingerprint)
    assert in_memory.source == "memory"


def test_tied_models_agree_too(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path)
    stored = FrozenTarget.load(tmp_path).fingerprint
    assert stored.weights == FrozenTarget(build("qwen2")).fingerprint.weights


def test_one_changed_weight_changes_it(folder: Path) -> None:
    before = FrozenTarget.load(folder).fingerprint
    edit(folder)
    after = FrozenTarget.load(folder).fingerprint
    assert after.weights != before.weights
    assert (after.config, after.tokenizer) == (before.config, before.tokenizer)
    assert not after.same_target(before)


def test_names_shapes_and_types_count() -> None:
    x = torch.arange(6, dtype=torch.float32)
    digests = [
        weights_digest(tensors)
        for tensors in (
            {"a": x, "b": x + 1},
            {"b": x, "a": x + 1},
            {"a": x.view(2, 3), "b": x + 1},
            {"a": x.double(), "b": x + 1},
            {"a": x},
            {"a": x, "b": torch.empty(0)},
        )
    ]
    assert len(set(digests)) == len(digests)
    assert weights_digest({"a": x, "tied": x}) == weights_digest({"a": x})
    transposed = torch.arange(6.0).view(2, 3).t()
    assert weights_digest({"a": transposed}) == weights_digest({"a": transposed.contiguous()})


def test_config_counts_but_not_what_is_volatile(folder: Path) -> None:
    before = FrozenTarget.load(folder).fingerprint
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "transformers_version": "9.9", "dtype": "bfloat16"}))
    assert FrozenTarget.load(folder).fingerprint == before
    file.write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert FrozenTarget.load(folder).fingerprint.config != before.config
    assert config_digest(build("llama").config) == before.config


def test_tokenizer_parts_count() -> None:
    plain = tiny_tokenizer()
    template, special = tiny_tokenizer(), tiny_tokenizer()
    template.chat_template = "{{ messages }}"
    special.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    variants = [plain, tiny_tokenizer(["zz"]), tiny_tokenizer(merges=[("l", "l")]), template, special]
    assert len({tokenizer_digest(t) for t in variants}) == len(variants)
    used = tiny_tokenizer()
    used(["a b", "c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(used) == tokenizer_digest(plain)
    assert tokenizer_digest(None) == "none"


def test_the_weight_digest_is_kept_on_disk(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FrozenTarget.load(folder).fingerprint
    assert len(list(cache.rglob("*.json"))) == 1
    monkeypatch.setattr(fingerprint, "_combine", None)  # hashing again would fail
    assert FrozenTarget.load(folder).fingerprint == first
    monkeypatch.undo()
    monkeypatch.setenv("EAGLELAB_CACHE", str(cache))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    monkeypatch.setattr(fingerprint, "_combine", lambda items, digest: "again")
    assert FrozenTarget.load(folder).fingerprint.weights == "again"


def test_a_broken_note_is_replaced(folder: Path, cache: Path) -> None:
    first = FrozenTarget.load(folder).fingerprint
    (note,) = cache.rglob("*.json")
    for text in ("not json", "[]", '{"weights": ["x"'):
        note.write_text(text)
        assert FrozenTarget.load(folder).fingerprint == first
        assert json.loads(note.read_text())["weights"] == first.weights


def test_an_unwritable_cache_only_costs_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FrozenTarget.load(folder).fingerprint
    blocked = folder / "a file"
    blocked.touch()
    monkeypatch.setenv("EAGLELAB_CACHE", str(blocked / "below"))
    assert FrozenTarget.load(folder).fingerprint == first


def test_pickled_checkpoints_are_hashed_as_stored(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "old")
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, tmp_path / "old" / "pytorch_model.bin")
    (tmp_path / "old" / "model.safetensors").unlink()
    stored = FrozenTarget.load(tmp_path / "old", dtype="bf16").fingerprint
    assert stored.same_target(FrozenTarget.load(folder).fingerprint)


def test_nan_in_a_file_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][5, 5] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tensor 'lm_head\.weight' holds NaN"):
        fingerprint._safetensors_digest([folder / "model.safetensors"])
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        FrozenTarget.load(folder)


def test_large_finite_weights_are_fine() -> None:
    assert weights_digest({"a": torch.full((10,), 3e38)})
