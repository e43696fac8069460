"""Checks of what callers hand to the target: shapes, token ids, positions. Pure functions.

Letters: B batch, S tokens, N new rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tokens(tokens: Tensor, real: Tensor | None, vocab_size: int, what: str) -> Tensor:
    """Token ids as int64 with padding set to 0.

    Raises:
        ValueError: not two-dimensional integers, empty, or an id outside the vocabulary.
    """
    if tokens.ndim != 2 or tokens.numel() == 0 or tokens.is_floating_point():
        raise ValueError(
            f"{what}: expected non-empty integer token ids of shape [batch, tokens], got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}. Add the batch dimension, or drop the "
            "empty sample."
        )
    tokens = tokens.long()
    if real is not None:
        tokens = tokens.masked_fill(~real, 0)
    low, high = torch.stack(torch.aminmax(tokens)).tolist()  # one wait, not two
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        row, column = (tokens == bad).nonzero()[0].tolist()
        raise ValueError(
            f"{what}: token id {bad} at row {row}, column {column} is outside the target's "
            f"vocabulary of {vocab_size}. Tokenize with the target's own tokenizer, and mark "
            "padding as not valid."
        )
    return tokens


def check_shape(tensor: Tensor, shape: tuple[int, ...], what: str) -> Tensor:
    """Raises ValueError unless the tensor has exactly this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}, expected {shape} like the tokens it belongs "
            "to. Build it from the same batch."
        )
    return tensor


def check_positions(position: Tensor, max_positions: int) -> None:
    """Raises ValueError if a position lies outside the target's context."""
    low, high = torch.stack(torch.aminmax(position)).tolist()
    if low < 0 or high >= max_positions:
        raise ValueError(
            f"position {high if high >= max_positions else low} is outside the target's context of "
            f"{max_positions} positions. Shorten or truncate the sequence, or stop decoding "
            "earlier."
        )


def segments_of(tokens_BS: Tensor, valid_BS: Tensor | None, segment_BS: Tensor | None) -> Tensor:
    """Segment ids [B, S] with -1 on padding, from whatever the caller gave."""
    shape = tuple(tokens_BS.shape)
    if segment_BS is None:
        segment_BS = torch.zeros(shape, dtype=torch.int64, device=tokens_BS.device)
    segment_BS = check_shape(segment_BS, shape, "segment_BS").to(tokens_BS.device)
    if valid_BS is not None:
        valid_BS = check_shape(valid_BS, shape, "valid_BS").to(tokens_BS.device).bool()
        segment_BS = segment_BS.masked_fill(~valid_BS, -1)
    return segment_BS


def positions_of(segment_BS: Tensor) -> Tensor:
    """Positions restarting at 0 in each segment (0 on padding), [B, S]."""
    index_1S = torch.arange(segment_BS.shape[1], device=segment_BS.device)[None]
    starts_BS = torch.ones_like(segment_BS, dtype=torch.bool)
    starts_BS[:, 1:] = segment_BS[:, 1:] != segment_BS[:, :-1]
    start_BS = torch.where(starts_BS, index_1S, 0).cummax(dim=1).values
    return (index_1S - start_BS).masked_fill(segment_BS < 0, 0)


def check_rows(
    tokens_BN: Tensor,
    position_BN: Tensor | None,
    ancestor_BNN: Tensor | None,
    batch: int,
    count_B: Sequence[int] | None,
) -> tuple[int, int]:
    """Shapes of rows to append, by host work alone; returns B and N.

    Raises:
        ValueError: a shape that does not fit the cache's batch or the tokens.
    """
    if tokens_BN.ndim != 2 or tokens_BN.shape[0] != batch or tokens_BN.shape[1] < 1:
        raise ValueError(
            f"forward_rows: tokens have shape {tuple(tokens_BN.shape)}, expected [{batch}, at least "
            f"1] for a cache of {batch} sequences. Give one line of tokens per sequence."
        )
    B, N = tokens_BN.shape
    if count_B is not None and (len(count_B) != B or any(not 0 <= int(c) <= N for c in count_B)):
        raise ValueError(
            f"count_B {list(count_B)} must give one number from 0 to {N} for each of the {B} "
            "sequences: the rows that are not padding."
        )
    if position_BN is not None:
        check_shape(position_BN, (B, N), "position_BN")
    if ancestor_BNN is not None:
        check_shape(ancestor_BNN, (B, N, N), "ancestor_BNN")
    return B, N


def regular(tensor: Tensor) -> Tensor:
    """The same values with the strides of a new tensor; a compiled function is compiled again for other strides, even
    those of a dimension of one."""
    return tensor.contiguous().view(-1).view(tensor.shape)
