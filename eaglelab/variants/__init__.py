"""The variants: one small LightningModule each over a shared base.

To add one: subclass :class:`DraftingModule` in a file of its own (``variant``, ``taps``, ``build_network``,
``passes``), list it in ``VARIANTS``, and give it ``configs/variant/NAME.yaml`` with its ``_target_``.
"""

from eaglelab.variants.base import DraftingModule, Pass
from eaglelab.variants.eagle import EagleModule
from eaglelab.variants.eagle3 import Eagle3Module
from eaglelab.variants.hass import HassModule
from eaglelab.variants.optim import OptimConfig
from eaglelab.variants.simulation import ChainSimulation
from eaglelab.variants.view import View

VARIANTS: dict[str, type[DraftingModule]] = {one.variant: one for one in (EagleModule, HassModule, Eagle3Module)}
"""Variant name, as manifests record it, -> module class."""

__all__ = [
    "VARIANTS",
    "ChainSimulation",
    "DraftingModule",
    "Eagle3Module",
    "EagleModule",
    "HassModule",
    "OptimConfig",
    "Pass",
    "View",
]
