"""Drafter networks, their attention and their decoding-time form."""

from eaglelab.drafters.attention import RolloutContext, joint_attention
from eaglelab.drafters.config import DrafterConfig
from eaglelab.drafters.feature import FeatureDrafter
from eaglelab.drafters.runtime import DraftState, SlotDrafter

__all__ = ["DraftState", "DrafterConfig", "FeatureDrafter", "RolloutContext", "SlotDrafter", "joint_attention"]
