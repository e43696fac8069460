"""What a variant sees of a batch: the compiled rows with the target's answers to them.

Letters: B sequences, S tokens, R rows, T taps, d hidden width, w width of a teacher row.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglelab.data.batch import Batch
from eaglelab.data.needed import NeededRows
from eaglelab.data.rows import Rows
from eaglelab.features.source import FeatureSource, Head, OnlineFeatures
from eaglelab.target import FrozenTarget, Tap


@dataclasses.dataclass
class View:
    """Rows of a batch and everything that the frozen target says about them.

    Step 0 is the row itself; step ``s`` of root ``t`` looks ``s`` tokens further along the data.

    Attributes:
        rows: the plan.
        tokens_BS: token ids.
        taps_BRF: the drafter's input streams at ``t``, concatenated, F = T * d.
        teacher_BSw: teacher rows: the target's last hidden state after its final norm, unless a feature store keeps
            something smaller.
        teacher_head: reads teacher rows: [..., w] -> the target's logits; None: the target's own head.
        has_last_feature: whether teacher rows are last hidden states (w = d).
    """

    rows: Rows
    tokens_BS: Tensor
    taps_BRF: Tensor
    teacher_BSw: Tensor
    target: FrozenTarget
    teacher_head: Head | None = None
    has_last_feature: bool = True

    @classmethod
    def of(cls, batch: Batch, target: FrozenTarget, taps: tuple[Tap, ...], source: FeatureSource | None = None) -> View:
        """Get the features of a batch from ``source``; None: run the target over it. No gradient reaches them."""
        source = OnlineFeatures(target) if source is None else source
        features = source.of(batch, taps)
        tapped_BRF = torch.cat([batch.rows.gather(features.streams[tap]) for tap in taps], dim=-1)
        last = source.has_last_feature
        return cls(batch.rows, batch.tokens_BS, tapped_BRF, features.teacher_BSw, target, features.teacher_head, last)

    def embedding(self, step: int = 0) -> Tensor:
        """[B, R, d], the target's embedding of the advanced token ``x_{t+1+step}``."""
        return self.target.embed(self.rows.gather(self.tokens_BS, 1 + step))

    def teacher(self, step: int = 0) -> Tensor:
        """[B, R, w], teacher row ``t+1+step``: source of ``q``, and the feature that is regressed."""
        return self.rows.gather(self.teacher_BSw, 1 + step)

    def teacher_logits(self, teacher: Tensor) -> Tensor:
        """Teacher rows [..., w] -> the target's logits [..., V]."""
        head = self.target.lm_head if self.teacher_head is None else self.teacher_head
        return head(teacher)

    def drafted_logits(self, ids_K: Tensor) -> Head:
        """Teacher rows [..., w] -> the target's logits of the tokens ``ids_K`` alone [..., K]."""
        own = self.teacher_head is None or self.teacher_head == self.target.lm_head
        if own and self.target.head_logits_are_linear:
            weight_Kd = self.target.head_weight[ids_K]
            return lambda teacher: F.linear(teacher.to(weight_Kd.dtype), weight_Kd)
        return lambda teacher: self.teacher_logits(teacher)[..., ids_K]

    def of_needed(self, needed: NeededRows) -> View:
        """The same view of the needed rows only, without taps: those are fused for all rows."""
        return dataclasses.replace(self, rows=needed.rows, taps_BRF=self.taps_BRF[:, :0])

    def label(self, step: int = 0) -> Tensor:
        """int64 [B, R], the data's token ``x_{t+2+step}``, which the logits are for; rows must reach that far."""
        return self.rows.gather(self.tokens_BS, 2 + step)

    def position(self, step: int = 0) -> Tensor:
        """int64 [B, R], rotary position ``t + step``."""
        last = self.target.max_positions - 1
        return (self.rows.position_BR + step).clamp(max=last)

    def sample_length(self) -> Tensor:
        """int64 [B, R], tokens of the segment that each row belongs to."""
        return self.rows.position_BR + self.rows.remaining_BR + 1
