"""Losses and noise, each a pure function of tensors."""

from eaglelab.objectives.chunked import chunked_sum
from eaglelab.objectives.distillation import Distillation, distill
from eaglelab.objectives.noise import NoiseLaw, feature_noise
from eaglelab.objectives.regression import smooth_l1

__all__ = ["Distillation", "NoiseLaw", "chunked_sum", "distill", "feature_noise", "smooth_l1"]
