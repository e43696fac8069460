"""Manifests round-trip and say exactly where two artefacts part."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from eaglelab.target import DRAFTER_FIELDS, FeatureManifest, ManifestMismatch, TargetFingerprint

TARGET = TargetFingerprint("c" * 64, "w" * 64, "t" * 64, source="some/model", revision="abc")
MANIFEST = FeatureManifest(
    target=TARGET,
    taps=(2, "final"),
    tap_norm="post",
    feature_dtype="bfloat16",
    head="target:123",
    embedding="target:456",
    dtype_policy={"target": "bfloat16", "loss": "float32"},
    drafter={"hidden_size": 32, "rope": {"theta": 10000.0}},
    draft_vocabulary="789",
    variant="eagle",
    switches={"supervise": "advanced", "depth": 7},
    software={"torch": "2.13.0"},
)


def test_round_trip(tmp_path: Path) -> None:
    assert FeatureManifest.from_json(MANIFEST.to_json()) == MANIFEST
    file = MANIFEST.save(tmp_path / "run")
    assert file == tmp_path / "run" / "manifest.json"
    assert FeatureManifest.load(tmp_path / "run") == FeatureManifest.load(file) == MANIFEST
    assert MANIFEST.to_json() == FeatureManifest.load(file).to_json()
    minimal = FeatureManifest(target=TARGET, taps=(0,), tap_norm="pre")
    assert FeatureManifest.from_json(minimal.to_json()) == minimal


def test_it_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        MANIFEST.variant = "hass"  # type: ignore[misc]


CHANGES: dict[str, Any] = {
    "target": replace(TARGET, weights="x" * 64),
    "taps": (2, 3),
    "tap_norm": "pre",
    "layout": "S d",
    "feature_dtype": "float32",
    "head": "target:124",
    "embedding": "own:1",
    "dtype_policy": {"target": "float32", "loss": "float32"},
    "drafter": {"hidden_size": 32, "rope": {"theta": 500000.0}},
    "draft_vocabulary": None,
    "tree_abi": 2,
    "variant": "hass",
    "switches": {"supervise": "source", "depth": 7},
    "software": {"torch": "2.12.0"},
}
PLACES = {
    "target": "target.weights",
    "dtype_policy": "dtype_policy.target",
    "drafter": "drafter.rope.theta",
    "switches": "switches.supervise",
    "software": "software.torch",
}


def test_every_field_is_covered_here() -> None:
    assert set(CHANGES) == {f.name for f in fields(FeatureManifest)} - {"format"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_names_field_values_and_way_out(name: str) -> None:
    other = replace(MANIFEST, **{name: CHANGES[name]})
    rest = set(CHANGES) - {name}
    MANIFEST.require_same(other, rest)
    with pytest.raises(ManifestMismatch) as caught:
        MANIFEST.require_same(other, [name], "checkpoint against this run")
    text = str(caught.value)
    assert caught.value.field == PLACES.get(name, name)
    assert text.startswith(f"checkpoint against this run: field {caught.value.field} was recorded as")
    assert "Way out: " in text
    assert "\n" not in text


def test_the_way_back_to_the_recorded_target_is_spelled_out() -> None:
    other = replace(MANIFEST, target=replace(TARGET, weights="x" * 64))
    with pytest.raises(ManifestMismatch, match=r"pass target.source=some/model .*or retrain") as caught:
        MANIFEST.require_same(other)
    assert "w" * 64 in str(caught.value)
    assert "x" * 64 in str(caught.value)


def test_the_same_target_from_another_place_is_the_same() -> None:
    moved = replace(MANIFEST, target=replace(TARGET, source="/elsewhere", revision=None))
    MANIFEST.require_same(moved)
    MANIFEST.require_same(FeatureManifest.from_json(moved.to_json()), DRAFTER_FIELDS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "reads up to 1"),
        ({"format": None}, "format None"),
        ({"format": "1"}, "format '1'"),
        ({"colour": 1}, r"unknown fields \['colour'\]"),
        ({"target": {"weights": "x"}}, "field target is no fingerprint"),
    ],
)
def test_documents_of_another_kind_are_refused(change: dict, says: str, tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps({**MANIFEST.to_dict(), **change}))
    with pytest.raises(ValueError, match=says) as caught:
        FeatureManifest.load(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", '{"format": 1}'])
def test_broken_documents_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="manifest"):
        FeatureManifest.from_json(text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no manifest at"):
        FeatureManifest.load(tmp_path)
