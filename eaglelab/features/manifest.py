"""What features mean: the manifest that a store carries and that drafters trained on features start from."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

from eaglelab import __version__
from eaglelab.target import FINAL, FeatureManifest, FrozenTarget, Tap


def feature_manifest(target: FrozenTarget, taps: Sequence[Tap]) -> FeatureManifest:
    """Identity of the target, addresses and types of the features that it gives."""
    weights = target.fingerprint.weights
    dtype = str(target.dtype).removeprefix("torch.")
    return FeatureManifest(
        target=target.fingerprint,
        taps=tuple(taps),
        tap_norm="post" if tuple(taps) == (FINAL,) else "pre",
        layout="B S d",
        feature_dtype=dtype,
        head=f"target.lm_head:{weights[:16]}",
        embedding=f"target.embed:{weights[:16]}",
        dtype_policy={"target": dtype},
        software=software_versions(),
    )


def software_versions() -> dict[str, str]:
    """Versions of what the numbers depend on, for the record."""
    own = {"python": platform.python_version(), "eaglelab": __version__}  # a checkout need not be installed
    return own | {name: version(name) for name in ("torch", "transformers", "lightning")}
