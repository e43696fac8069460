"""The frozen target: one wrapper, its feature addresses, key/value slots and identity."""

from eaglelab.target.fingerprint import TargetFingerprint, cache_folder
from eaglelab.target.frozen import FrozenTarget, RowsOutput
from eaglelab.target.kv import KVSlots
from eaglelab.target.manifest import (
    DRAFTER_FIELDS,
    FEATURE_FIELDS,
    FeatureManifest,
    ManifestMismatch,
)
from eaglelab.target.masks import MaskRule
from eaglelab.target.taps import FINAL, Tap, default_taps, validate_taps

__all__ = [
    "DRAFTER_FIELDS",
    "FEATURE_FIELDS",
    "FINAL",
    "FeatureManifest",
    "FrozenTarget",
    "KVSlots",
    "ManifestMismatch",
    "MaskRule",
    "RowsOutput",
    "Tap",
    "TargetFingerprint",
    "cache_folder",
    "default_taps",
    "validate_taps",
]
