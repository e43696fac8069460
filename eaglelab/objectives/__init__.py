"""Losses and noise, each a pure function of tensors."""

from eaglelab.objectives.chunked import chunked_sum
from eaglelab.objectives.distillation import Distillation, Taught, distill
from eaglelab.objectives.draft_vocabulary import DraftDistillation, TeacherHeads, distill_to_draft_vocabulary
from eaglelab.objectives.noise import NoiseLaw, feature_noise
from eaglelab.objectives.regression import smooth_l1

__all__ = [
    "Distillation",
    "DraftDistillation",
    "NoiseLaw",
    "Taught",
    "TeacherHeads",
    "chunked_sum",
    "distill",
    "distill_to_draft_vocabulary",
    "feature_noise",
    "smooth_l1",
]
