"""The feature manifest: what an artefact was made with, compared whenever two artefacts meet.

A checkpoint, a feature store and an exported drafter each carry one. Two of them fit together only
where the manifests agree; a difference is an error that names the field, both values and the way
out, never a silent reuse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from eaglelab.target.fingerprint import TargetFingerprint
from eaglelab.target.taps import Tap

FORMAT = 1

# What must be equal for one artefact to read another's features.
FEATURE_FIELDS = (
    "target",
    "taps",
    "tap_norm",
    "layout",
    "feature_dtype",
    "head",
    "embedding",
    "dtype_policy",
)
# What must be equal for a checkpoint to continue or to decode.
DRAFTER_FIELDS = (
    "target",
    "taps",
    "tap_norm",
    "head",
    "embedding",
    "drafter",
    "draft_vocabulary",
    "tree_abi",
    "variant",
)

_WAYS_OUT = {
    "target": "pass target.source=<the recorded source>, or retrain (rebuild the store) for this target",
    "taps": "use the recorded taps, or retrain (rebuild the store) with these",
    "tap_norm": "use the recorded tap norm, or retrain (rebuild the store)",
    "layout": "rebuild the feature store with this version",
    "feature_dtype": "load the target in the recorded type, or rebuild the feature store",
    "head": "pass target.source=<the recorded source>, or retrain against this head",
    "embedding": "pass target.source=<the recorded source>, or retrain against this embedding",
    "dtype_policy": "set the recorded precision, or rebuild (retrain) with this one",
    "drafter": "take the drafter settings from the checkpoint, or train a new drafter",
    "draft_vocabulary": "keep the map stored beside the draft head; a head never gets a new map",
    "tree_abi": "use the eaglelab version that wrote it, or export it again",
    "variant": "pass variant=<the recorded one>, or start a new run",
    "switches": "set the recorded switches, or start a new run",
    "software": "install the recorded versions if exact numbers matter",
}


class ManifestMismatch(ValueError):  # noqa: N818
    """Two artefacts that do not belong together. ``field`` names the first difference."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class FeatureManifest:
    """Everything that decides whether features, drafters and targets fit together.

    Attributes:
        target: fingerprint of the target.
        taps: feature addresses, in the order in which they are concatenated.
        tap_norm: "post": after the final norm (the tap "final"); "pre": residual streams.
        layout: axes of a stored feature.
        feature_dtype: type in which features are kept.
        head: identity of the LM head, ``<kind>:<digest>``.
        embedding: identity of the token embedding, ``<kind>:<digest>``.
        dtype_policy: precision by role, such as ``{"target": "bfloat16", "loss": "float32"}``.
        drafter: the drafter's configuration.
        draft_vocabulary: digest of the draft vocabulary, None for the target's own.
        tree_abi: version of the tree's row layout.
        variant: "eagle", "hass", "eagle3" ...
        switches: the variant's contract switches (supervision, alignment, reduction ...).
        software: versions, for the record.
        format: version of this document.
    """

    target: TargetFingerprint
    taps: tuple[Tap, ...]
    tap_norm: Literal["post", "pre"]
    layout: str = "B S d"
    feature_dtype: str = "float32"
    head: str = ""
    embedding: str = ""
    dtype_policy: Mapping[str, str] = field(default_factory=dict)
    drafter: Mapping[str, Any] = field(default_factory=dict)
    draft_vocabulary: str | None = None
    tree_abi: int = 1
    variant: str = ""
    switches: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of `from_dict`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["target"] = self.target.to_dict()
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "manifest") -> FeatureManifest:
        """Read a manifest.

        Raises:
            ValueError: a newer format, an unknown field or a missing one.
        """
        version = values.get("format")
        if not isinstance(version, int) or not 1 <= version <= FORMAT:
            raise ValueError(
                f"{where} has manifest format {version!r}, this eaglelab reads up to {FORMAT}. "
                "Upgrade eaglelab, or write the artefact again with this version."
            )
        known = {f.name for f in fields(cls)}
        required = {"target", "taps", "tap_norm"}
        unknown, missing = sorted(set(values) - known), sorted(required - set(values))
        if unknown or missing:
            raise ValueError(
                f"{where} is no feature manifest: unknown fields {unknown}, missing fields "
                f"{missing}. Give the manifest.json that eaglelab wrote beside the artefact."
            )
        try:
            target = TargetFingerprint.from_dict(values["target"])
        except TypeError as error:
            raise ValueError(
                f"{where}: field target is no fingerprint ({error}). Give the manifest.json that "
                "eaglelab wrote beside the artefact."
            ) from None
        return cls(**{**values, "target": target, "taps": tuple(values["taps"])})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "manifest") -> FeatureManifest:
        """Raises ValueError for text that is no manifest of a format this version reads."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}). Restore the file.") from None
        if not isinstance(values, dict):
            raise ValueError(f"{where} is no feature manifest but a {type(values).__name__}.")
        return cls.from_dict(values, where)

    def save(self, path: str | Path) -> Path:
        """Write to a file, or to ``manifest.json`` in a folder; returns the file."""
        file = _file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.to_json(), encoding="utf-8")
        return file

    @classmethod
    def load(cls, path: str | Path) -> FeatureManifest:
        """Read from a file, or from ``manifest.json`` in a folder.

        Raises:
            ValueError: no such file, or no manifest of a format this version reads.
        """
        file = _file(path)
        if not file.is_file():
            raise ValueError(
                f"no manifest at {file}: give the folder of a run, a feature store or an exported "
                "drafter that eaglelab wrote."
            )
        return cls.from_json(file.read_text(encoding="utf-8"), str(file))

    def require_same(
        self,
        other: FeatureManifest,
        fields: Iterable[str] = FEATURE_FIELDS,
        context: str = "these artefacts do not belong together",
    ) -> None:
        """Compare with another manifest. ``self`` is what was recorded, ``other`` what is met now.

        Targets are compared by digest, wherever they were loaded from.

        Raises:
            ManifestMismatch: names the field (inside a mapping, the key), both values, the way out.
        """
        for name in fields:
            recorded, present = _plain(getattr(self, name)), _plain(getattr(other, name))
            difference = _first_difference(name, recorded, present)
            if difference is None:
                continue
            where, was, now = difference
            way_out = _WAYS_OUT.get(name, "use the recorded value, or make the artefact again")
            if name == "target":
                way_out = way_out.replace("<the recorded source>", f"{self.target.source} (the recorded source)")
            raise ManifestMismatch(
                f"{context}: field {where} was recorded as {was!r} but is {now!r} here. Way out: {way_out}.",
                where,
            )


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".json" else path / "manifest.json"


def _plain(value: Any) -> Any:
    if isinstance(value, TargetFingerprint):
        return value.digests
    return json.loads(json.dumps(value))


def _first_difference(name: str, recorded: Any, present: Any) -> tuple[str, Any, Any] | None:
    if isinstance(recorded, dict) and isinstance(present, dict):
        for key in sorted({*recorded, *present}):
            inner = _first_difference(f"{name}.{key}", recorded.get(key), present.get(key))
            if inner is not None:
                return inner
        return None
    return None if recorded == present else (name, recorded, present)
