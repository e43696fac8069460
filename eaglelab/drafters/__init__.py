"""Drafter networks, their attention and their decoding-time form."""

from eaglelab.drafters.attention import RolloutContext, ShippedContext
from eaglelab.drafters.config import DrafterConfig
from eaglelab.drafters.feature import FeatureDrafter
from eaglelab.drafters.fused import FusedDrafter
from eaglelab.drafters.joint import joint_attention
from eaglelab.drafters.layers import compile_parts
from eaglelab.drafters.network import DraftNetwork, Head
from eaglelab.drafters.runtime import DraftState, SlotDrafter
from eaglelab.drafters.shared import SharedKeys

__all__ = [
    "DraftNetwork",
    "DraftState",
    "DrafterConfig",
    "FeatureDrafter",
    "FusedDrafter",
    "Head",
    "RolloutContext",
    "SharedKeys",
    "ShippedContext",
    "SlotDrafter",
    "compile_parts",
    "joint_attention",
]
