"""Long packed rows as sequences of their own, so that the target needs no mask of all pairs of tokens.

A mask is S * S numbers: at 32,768 tokens 4 GiB in fp32. A segment alone needs none, because plain causal attention with
padding behind it is already right, and the kernels for that are linear in memory.

Letters: B rows, S tokens, G segments of a group, L tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eaglelab.target.taps import Tap

MASKED_LENGTH = 1024
"""Tokens of a packed row up to which a mask is small (4 MiB in fp32) and one forward pass is best."""


@dataclass(frozen=True)
class SegmentGroup:
    """Segments of alike length, one per sequence.

    Attributes:
        address_GL: int64, ``b * S + s`` of every token; padding repeats the segment's last token.
        place_T: int64, ``g * L + l`` of the tokens that are no padding.
    """

    address_GL: Tensor
    place_T: Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SegmentGroup:
        """A copy on ``device``."""
        return SegmentGroup(*(x.to(device, non_blocking=non_blocking) for x in (self.address_GL, self.place_T)))


def unpack(segment_BS: Tensor, position_BS: Tensor) -> list[SegmentGroup] | None:
    """Groups of segments, each with at most B S token slots, padding at most half of them.

    Args:
        segment_BS: -1 on padding.
        position_BS: positions.

    Returns:
        None where segments are no runs of tokens with positions 0, 1, 2 ...: those need the mask.
    """
    B, S = segment_BS.shape
    device = segment_BS.device
    valid_BS = segment_BS >= 0
    begins_BS = valid_BS.clone()
    begins_BS[:, 1:] &= segment_BS[:, 1:] != segment_BS[:, :-1]
    index_S = torch.arange(S, device=device)
    start_BS = torch.where(begins_BS, index_S, 0).cummax(dim=1).values
    in_order_BS = position_BS == index_S - start_BS
    highest_BS = segment_BS.cummax(dim=1).values
    new_BS = torch.ones_like(begins_BS)
    new_BS[:, 1:] = segment_BS[:, 1:] > highest_BS[:, :-1]
    if not bool((~valid_BS | (in_order_BS & (new_BS | ~begins_BS))).all()):
        return None
    address_N = begins_BS.flatten().nonzero().flatten()
    run_BS = (begins_BS.flatten().cumsum(0) - 1)[valid_BS.flatten()]
    length_N = torch.bincount(run_BS, minlength=len(address_N))
    order_N = length_N.argsort(descending=True, stable=True)
    groups = []
    lengths = length_N[order_N].tolist()
    for first, stop in _spans(lengths, B * S):
        chosen_G = order_N[first:stop]
        step_L = torch.arange(lengths[first], device=device)
        real_GL = step_L < length_N[chosen_G, None]
        address_GL = address_N[chosen_G, None] + torch.minimum(step_L, length_N[chosen_G, None] - 1)
        groups.append(SegmentGroup(address_GL, real_GL.flatten().nonzero().flatten()))
    return groups


def features_of_segments(
    groups: Sequence[SegmentGroup], tokens_BS: Tensor, run: Callable[[Tensor, Tensor], dict[Tap, Tensor]]
) -> dict[Tap, Tensor]:
    """Features [B, S, d] by tap, zero on padding, from ``run(tokens, positions)`` of each group."""
    whole: dict[Tap, Tensor] = {}
    for group in groups:
        position_1L = torch.arange(group.address_GL.shape[1], device=tokens_BS.device)[None]
        tokens_GL = tokens_BS.flatten()[group.address_GL]
        address_T = group.address_GL.flatten()[group.place_T]
        for tap, part_GLd in run(tokens_GL, position_1L.expand_as(tokens_GL)).items():
            if tap not in whole:
                whole[tap] = part_GLd.new_zeros(tokens_BS.numel(), part_GLd.shape[-1])
            whole[tap][address_T] = part_GLd.flatten(0, 1)[group.place_T]
    return {tap: rows_Td.view(*tokens_BS.shape, -1) for tap, rows_Td in whole.items()}


def passes_missing(layer: nn.Module, passes: int, device: torch.device) -> int:
    """How many forward passes beyond its ``passes`` this process owes the others; to be asked before the first one.

    Processes that share a sharded layer gather it in every pass, so all must make equally many, however their rows are
    segmented. 0 where the layer is whole.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(layer, FSDPModule):
        return 0
    most = torch.tensor(passes, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most) - passes


def _spans(lengths: list[int], slots: int) -> list[tuple[int, int]]:
    """Cut falling lengths into groups [first, stop)."""
    spans: list[tuple[int, int]] = []
    first = 0
    for at, length in enumerate(lengths):
        if (at + 1 - first) * lengths[first] > slots or 2 * length < lengths[first]:
            spans.append((first, at))
            first = at
    return [*spans, (first, len(lengths))] if lengths else []
