"""Batch: packed token rows and their compiled training plan.

Letters: B sequences (packed rows), S tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eaglelab.data.rows import Rows

if TYPE_CHECKING:
    from eaglelab.target.sequences import SequencePlan


@dataclasses.dataclass
class Batch:
    """What a training step receives. Built on CPU by :func:`eaglelab.data.packing.collate`.

    Attributes:
        tokens_BS: int64 token ids; 0 on padding.
        valid_BS: bool, True where a token exists.
        segment_BS: int64, 0, 1, 2.. for the conversations packed in a sequence, -1 on padding.
        position_BS: int64, restarts at 0 in every segment; 0 on padding.
        answer_BS: bool, the token is part of an assistant answer (its end-of-turn token included).
        rows: the training plan compiled from the four masks above.
        features: what the target says about the tokens, as a feature store keeps it, each [B, S, ...]; empty where
            the target is run in training.
        sequences: how the target reads the tokens, pass by pass, where a trainer moves batches: planned on the host.
        following: the next batch, on the host, where a loader looks ahead.
        ticket: tells a batch that was announced as the following one, on every device.
    """

    tokens_BS: Tensor
    valid_BS: Tensor
    segment_BS: Tensor
    position_BS: Tensor
    answer_BS: Tensor
    rows: Rows
    features: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    sequences: tuple[SequencePlan, ...] | None = None
    following: Batch | None = None
    ticket: object | None = None

    @property
    def batch_size(self) -> int:
        """Sequences in the batch."""
        return self.tokens_BS.shape[0]

    @property
    def supervised(self) -> int:
        """Rows that enter the loss."""
        return self.rows.num_supervised

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """A copy on ``device``. Lightning calls this one."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        features, sequences = parts.pop("features"), parts.pop("sequences")
        following, ticket = parts.pop("following"), parts.pop("ticket")
        moved = {name: part.to(device, non_blocking=non_blocking) for name, part in parts.items()}
        return Batch(
            **moved,
            features={k: v.to(device, non_blocking=non_blocking) for k, v in features.items()},
            sequences=sequences and tuple(plan.to(device, non_blocking) for plan in sequences),
            following=following,
            ticket=ticket,
        )

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory. Called by torch's ``DataLoader(pin_memory=True)``."""
        features = {name: feature.pin_memory() for name, feature in self.features.items()}
        return dataclasses.replace(self, **_pinned(self), rows=_pin_rows(self.rows), features=features)


def _pin_rows(rows: Rows) -> Rows:
    return dataclasses.replace(rows, **_pinned(rows))


def _pinned(record: Batch | Rows) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: value.pin_memory() for name, value in values.items() if isinstance(value, Tensor)}
