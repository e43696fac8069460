"""The manifest of a drafter in training, and what must agree before its checkpoint is taken up again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from eaglelab.drafters import DrafterConfig
from eaglelab.features.manifest import feature_manifest
from eaglelab.target import FeatureManifest

if TYPE_CHECKING:
    from eaglelab.variants.base import DraftingModule

CONTRACT_FIELDS = ("target", "taps", "tap_norm", "drafter", "draft_vocabulary", "variant", "switches")
"""Fields that decide what the weights and the optimizer state mean. Software versions may differ."""

WEIGHT_FIELDS = ("target", "taps", "tap_norm", "drafter", "draft_vocabulary")
"""Fields that decide what the weights alone mean, whatever objective they were trained with."""


def build_manifest(module: DraftingModule) -> FeatureManifest:
    """Freeze the addresses that ``module`` trains against."""
    return dataclasses.replace(
        feature_manifest(module.target, module.taps),
        dtype_policy={"drafter": "float32", "softmax": "float32", "loss": "float32"},
        drafter=module.drafter_config.to_dict(),
        draft_vocabulary=module.draft_vocabulary.digest if module.draft_vocabulary else None,
        variant=module.variant,
        switches=module.contract.to_dict(),
    )


def with_defaults(saved: FeatureManifest, module: DraftingModule) -> FeatureManifest:
    """``saved`` with the switches and drafter fields that it is too old to know at their defaults."""
    optional = {
        field.name: field.default
        for field in dataclasses.fields(DrafterConfig)
        if field.default is not dataclasses.MISSING
    }
    switches = module.contract_type().to_dict()
    return dataclasses.replace(saved, drafter=optional | {**saved.drafter}, switches=switches | {**saved.switches})


def require_same_contract(saved: FeatureManifest, module: DraftingModule) -> None:
    """Refuse to continue training under another contract.

    Raises:
        ManifestMismatch: names the first field that differs, both values and the way out.
    """
    saved = with_defaults(saved, module)
    saved.require_same(module.manifest(), CONTRACT_FIELDS, "this checkpoint cannot be continued here")


def require_same_weights(saved: FeatureManifest, module: DraftingModule, source: str) -> None:
    """Refuse to start from the weights of another drafter.

    Raises:
        ManifestMismatch: as above.
    """
    saved = with_defaults(saved, module)
    saved.require_same(module.manifest(), WEIGHT_FIELDS, f"init_from={source} does not fit")
