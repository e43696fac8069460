"""What a variant sees of a batch: the compiled rows with the target's answers to them.

Letters: B sequences, S tokens, R rows, T taps, d hidden width.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from eaglelab.data.batch import Batch
from eaglelab.data.rows import Rows
from eaglelab.target import FrozenTarget, Tap


@dataclasses.dataclass
class View:
    """Rows of a batch and everything that the frozen target says about them.

    Step 0 is the row itself; step ``s`` of root ``t`` looks ``s`` tokens further along the data.

    Attributes:
        rows: the plan.
        tokens_BS: token ids.
        taps_BRF: the drafter's input streams at ``t``, concatenated, F = T * d.
        final_BSd: the target's last hidden state after its final norm, for teachers.
    """

    rows: Rows
    tokens_BS: Tensor
    taps_BRF: Tensor
    final_BSd: Tensor
    target: FrozenTarget

    @classmethod
    def of(cls, batch: Batch, target: FrozenTarget, taps: tuple[Tap, ...]) -> View:
        """Run the target once over the batch. No gradient reaches it."""
        streams = target.features(
            batch.tokens_BS,
            tuple(dict.fromkeys((*taps, "final"))),
            valid_BS=batch.valid_BS,
            segment_BS=batch.segment_BS,
            position_BS=batch.position_BS,
        )
        tapped_BRF = torch.cat([batch.rows.gather(streams[tap]) for tap in taps], dim=-1)
        return cls(batch.rows, batch.tokens_BS, tapped_BRF, streams["final"], target)

    def embedding(self, step: int = 0) -> Tensor:
        """[B, R, d], the target's embedding of the advanced token ``x_{t+1+step}``."""
        return self.target.embed(self.rows.gather(self.tokens_BS, 1 + step))

    def teacher(self, step: int = 0) -> Tensor:
        """[B, R, d], the target's feature ``f_{t+1+step}``: regression target and source of ``q``."""
        return self.rows.gather(self.final_BSd, 1 + step)

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
