"""Where training gets the target's features from. The variants see a batch's features, never their origin.

Letters: B sequences, S tokens, d hidden width, w width of a teacher row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from eaglelab.data.batch import Batch
from eaglelab.target import FINAL, FrozenTarget, SequencePlan, Tap

Head = Callable[[Tensor], Tensor]


@dataclasses.dataclass
class Features:
    """What the target says about the tokens of a batch.

    Attributes:
        streams: [B, S, d] by tap, in the target's dtype.
        teacher_BSw: one teacher row per token; what it holds only ``teacher_head`` knows.
        teacher_head: [..., w] -> the target's next-token logits [..., V].
    """

    streams: Mapping[Tap, Tensor]
    teacher_BSw: Tensor
    teacher_head: Head


class FeatureSource(Protocol):
    """Gives the features of a batch.

    Attributes:
        has_last_feature: whether teacher rows are the target's last features (w = d), which regression losses read.
    """

    @property
    def has_last_feature(self) -> bool: ...

    def plan(self, batch: Batch) -> SequencePlan | None:
        """What the target has to know of a batch on the host; None where it is not run."""
        ...

    def of(self, batch: Batch, taps: tuple[Tap, ...]) -> Features:
        """The streams named by ``taps`` and the teacher rows, without gradient."""
        ...


class OnlineFeatures:
    """Runs the target over every batch."""

    has_last_feature = True

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target

    def plan(self, batch: Batch) -> SequencePlan:
        return self.target.plan_sequences(
            batch.tokens_BS, valid_BS=batch.valid_BS, segment_BS=batch.segment_BS, position_BS=batch.position_BS
        )

    def of(self, batch: Batch, taps: tuple[Tap, ...]) -> Features:
        plan = batch.sequences if batch.sequences is not None else self.plan(batch).to(self.target.device)
        streams = self.target.features_of(plan, tuple(dict.fromkeys((*taps, FINAL))))
        return Features(streams, streams[FINAL], self.target.lm_head)
