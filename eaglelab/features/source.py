"""Where training gets the target's features from. The variants see a batch's features, never their origin.

Letters: B sequences, S tokens, d hidden width, w width of a teacher row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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

    def plan(self, batch: Batch) -> tuple[SequencePlan, ...] | None:
        """What the target has to know of a batch on the host, pass by pass; None where it is not run."""
        ...

    def of(self, batch: Batch, taps: tuple[Tap, ...]) -> Features:
        """The streams named by ``taps`` and the teacher rows, without gradient."""
        ...


class OnlineFeatures:
    """Runs the target over every batch.

    Args:
        target: the target.
        rows: sequences of a pass, at most; None: those of the batch. A pass holds the activations of a layer, which
            for a large target are more than the drafter's.

    Raises:
        ValueError: ``rows`` below 1.
    """

    has_last_feature = True

    def __init__(self, target: FrozenTarget, rows: int | None = None) -> None:
        if rows is not None and rows < 1:
            raise ValueError(f"features.rows={rows}: the target takes at least one row at a time; null for all of them")
        self.target, self.rows = target, rows

    def plan(self, batch: Batch) -> tuple[SequencePlan, ...]:
        B = batch.batch_size
        step = min(self.rows or B, B)
        parts = [slice(first, first + step) for first in range(0, B, step)]
        return tuple(
            self.target.plan_sequences(
                batch.tokens_BS[part],
                valid_BS=batch.valid_BS[part],
                segment_BS=batch.segment_BS[part],
                position_BS=batch.position_BS[part],
            )
            for part in parts
        )

    def of(self, batch: Batch, taps: tuple[Tap, ...]) -> Features:
        plans = batch.sequences
        if plans is None:
            plans = tuple(plan.to(self.target.device) for plan in self.plan(batch))
        wanted = tuple(dict.fromkeys((*taps, FINAL)))
        streams = self.target.features_of(plans[0], wanted) if len(plans) == 1 else self._in_parts(plans, wanted)
        return Features(streams, streams[FINAL], self.target.lm_head)

    def _in_parts(self, plans: Sequence[SequencePlan], taps: tuple[Tap, ...]) -> dict[Tap, Tensor]:
        """Those of all plans; beside them there are never more than one plan's."""
        B, done = sum(len(plan.tokens_BS) for plan in plans), 0
        whole: dict[Tap, Tensor] = {}
        missing = self.target.passes_missing(plans)  # of all: processes may have unequally many
        for plan in plans:
            part = self.target.features_of(plan, taps, missing=missing if plan is plans[-1] else 0)
            for tap in taps:
                stream = part.pop(tap)
                if tap not in whole:
                    whole[tap] = stream.new_empty(B, *stream.shape[1:])
                whole[tap][done : done + len(stream)] = stream
            done += len(plan.tokens_BS)
        return whole
