"""How the target reads packed rows: one pass, one pass with a mask, or segments apart. Planned where the tensors are.

A plan made on the host before a batch is moved leaves nothing to ask the device in a training step.

Letters: B rows, S tokens.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from eaglelab.target import inputs
from eaglelab.target.unpacking import MASKED_LENGTH, SegmentGroup, unpack


@dataclasses.dataclass(frozen=True)
class SequencePlan:
    """Checked rows and the way to run the target over them.

    Attributes:
        tokens_BS: int64 ids; 0 on padding.
        position_BS: int64; 0 on padding.
        segment_BS: int64; -1 on padding.
        plain: every row is one segment from position 0 on, with padding behind it: no mask is needed.
        groups: segments to run apart, because a mask of all pairs of tokens would be large; None: one pass.
    """

    tokens_BS: Tensor
    position_BS: Tensor
    segment_BS: Tensor
    plain: bool
    groups: tuple[SegmentGroup, ...] | None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SequencePlan:
        """A copy on ``device``."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking)
            for name in ("tokens_BS", "position_BS", "segment_BS")
        }
        groups = self.groups and tuple(group.to(device, non_blocking) for group in self.groups)
        return dataclasses.replace(self, **moved, groups=groups)


def plan_sequences(
    tokens_BS: Tensor,
    valid_BS: Tensor | None,
    segment_BS: Tensor | None,
    position_BS: Tensor | None,
    *,
    embedding_size: int,
    max_positions: int,
) -> SequencePlan:
    """Check rows and see how to run them; asks the device of ``tokens_BS`` what it has to know.

    Args: those of `FrozenTarget.features`, and the target's limits.

    Raises:
        ValueError: shapes, token ids or positions outside the limits.
    """
    segment_BS = inputs.segments_of(tokens_BS, valid_BS, segment_BS)
    padding_BS = segment_BS < 0
    tokens_BS = inputs.check_tokens(tokens_BS, ~padding_BS, embedding_size, "features")
    if position_BS is None:
        position_BS = inputs.positions_of(segment_BS)
    else:
        inputs.check_shape(position_BS, tuple(tokens_BS.shape), "position_BS")
        position_BS = position_BS.to(tokens_BS.device).masked_fill(padding_BS, 0)
    S = tokens_BS.shape[1]
    if max_positions < S:
        inputs.check_positions(position_BS, max_positions)
    index_1S = torch.arange(S, device=tokens_BS.device)[None]
    one_segment = (segment_BS <= 0).all() & ((position_BS == index_1S) | padding_BS).all()
    padding_last = ~(padding_BS[:, :-1] & ~padding_BS[:, 1:]).any()
    plain = bool(one_segment & padding_last)
    apart = None if plain or S <= MASKED_LENGTH else unpack(segment_BS, position_BS)
    return SequencePlan(tokens_BS, position_BS, segment_BS, plain, None if apart is None else tuple(apart))
