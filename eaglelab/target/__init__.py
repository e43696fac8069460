"""The frozen target: one wrapper, its feature addresses, key/value slots and identity."""

from eaglelab.target.experts import ExpertUnion, ExpertWatch
from eaglelab.target.fingerprint import TargetFingerprint, cache_folder
from eaglelab.target.frozen import FrozenTarget, RowsOutput
from eaglelab.target.head_only import HeadOnlyTarget
from eaglelab.target.kv import KVSlots, closing_order, moves
from eaglelab.target.manifest import (
    DRAFTER_FIELDS,
    FEATURE_FIELDS,
    FeatureManifest,
    ManifestMismatch,
)
from eaglelab.target.masks import MaskRule
from eaglelab.target.sequences import SequencePlan
from eaglelab.target.sharded import ShardedTarget
from eaglelab.target.taps import FINAL, Tap, default_taps, validate_taps

__all__ = [
    "DRAFTER_FIELDS",
    "FEATURE_FIELDS",
    "FINAL",
    "ExpertUnion",
    "ExpertWatch",
    "FeatureManifest",
    "FrozenTarget",
    "HeadOnlyTarget",
    "KVSlots",
    "ManifestMismatch",
    "MaskRule",
    "RowsOutput",
    "SequencePlan",
    "ShardedTarget",
    "Tap",
    "TargetFingerprint",
    "cache_folder",
    "closing_order",
    "default_taps",
    "moves",
    "validate_taps",
]
