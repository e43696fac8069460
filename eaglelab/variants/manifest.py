"""The manifest of a drafter in training, and what must agree before its checkpoint is taken up again."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from eaglelab.target import FeatureManifest

if TYPE_CHECKING:
    from eaglelab.variants.base import DraftingModule

CONTRACT_FIELDS = ("target", "taps", "tap_norm", "drafter", "draft_vocabulary", "variant", "switches")
"""Fields that decide what the weights and the optimizer state mean. Software versions may differ."""

WEIGHT_FIELDS = ("target", "taps", "tap_norm", "drafter", "draft_vocabulary")
"""Fields that decide what the weights alone mean, whatever objective they were trained with."""


def build_manifest(module: DraftingModule) -> FeatureManifest:
    """Freeze the addresses that ``module`` trains against."""
    target = module.target
    weights = target.fingerprint.weights
    return FeatureManifest(
        target=target.fingerprint,
        taps=module.taps,
        tap_norm="post" if module.taps == ("final",) else "pre",
        layout="B S d",
        feature_dtype=str(target.dtype).removeprefix("torch."),
        head=f"target.lm_head:{weights[:16]}",
        embedding=f"target.embed:{weights[:16]}",
        dtype_policy={"drafter": "float32", "softmax": "float32", "loss": "float32"},
        drafter=module.drafter_config.to_dict(),
        draft_vocabulary=module.draft_vocabulary.digest if module.draft_vocabulary else None,
        variant=module.variant,
        switches=module.switches,
        software=software_versions(),
    )


def software_versions() -> dict[str, str]:
    """Versions of what the numbers depend on, for the record."""
    names = ("eaglelab", "torch", "transformers", "lightning")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def require_same_contract(saved: FeatureManifest, current: FeatureManifest) -> None:
    """Refuse to continue training under another contract.

    Raises:
        ManifestMismatch: names the first field that differs, both values and the way out.
    """
    saved.require_same(current, CONTRACT_FIELDS, "this checkpoint cannot be continued here")
