"""Losses and noise, each a pure function of tensors."""

from eaglelab.objectives.distillation import Distillation, soft_cross_entropy
from eaglelab.objectives.noise import NoiseLaw, feature_noise
from eaglelab.objectives.regression import smooth_l1

__all__ = ["Distillation", "NoiseLaw", "feature_noise", "smooth_l1", "soft_cross_entropy"]
