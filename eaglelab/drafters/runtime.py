"""A drafter at decoding time: its own key/value slots over a network and the target's embedding and head.

Two kinds of rows live in the slots. *Committed* rows come from target features and stay; *provisional* rows are
tree nodes drafted in this round and are dropped when the round ends.

Letters: B sequences, N new rows, W frontier nodes, P provisional rows so far, K slots read, H heads, G key/value
heads, D head width, d hidden width, T taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglelab.drafters.config import DrafterConfig
from eaglelab.drafters.layers import Attend
from eaglelab.drafters.network import DraftNetwork
from eaglelab.ops import no_grad, on_device
from eaglelab.target import FrozenTarget, Tap, moves
from eaglelab.target.inputs import regular


class DraftState:
    """Draft key/value slots of a batch.

    Attributes:
        lengths: committed rows per sequence.
        provisional: tree rows written behind them, the same count in every sequence.
        compiled: run draft steps of a full batch through `torch.compile`, once per number of nodes.
        fixed: draft steps read all slots and learn lengths from the device alone, so that they can be recorded.
    """

    def __init__(self, config: DrafterConfig, batch: int, capacity: int, like: Tensor, room: int | None = None) -> None:
        self.room = max(batch, room or 0)
        shape = (self.room, config.num_key_value_heads, capacity, config.head_dim)
        self._keys_BGCD, self._values_BGCD = like.new_zeros(shape), like.new_zeros(shape)
        self.capacity = capacity
        self.provisional = 0
        self.compiled = self.fixed = False
        self.lengths = [0] * batch

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.uniform = len(set(lengths)) == 1
        self._length_B1 = None if self.uniform else on_device(lengths, self._keys_BGCD.device)[:, None]

    @contextmanager
    def fixed_at(self, length_B1: Tensor) -> Iterator[None]:
        """`fixed` within it, with committed lengths int64 [B, 1] of the device's own, for all provisional rows."""
        before = self._length_B1, self.uniform
        self._length_B1, self.uniform, self.fixed, self.provisional = length_B1, False, True, 0
        try:
            yield
        finally:
            (self._length_B1, self.uniform), self.fixed = before, False

    def reset(self, batch: int) -> None:
        """Forget everything, keep the buffers; ``batch`` sequences come next."""
        assert batch <= self.room
        self.provisional, self.lengths = 0, [0] * batch

    @property
    def row_bytes(self) -> int:
        """Memory of one row's key and value."""
        return 2 * self._keys_BGCD[0, :, 0].numel() * self._keys_BGCD.element_size()

    def write(self, k_BGND: Tensor, v_BGND: Tensor) -> tuple[Tensor, Tensor]:
        """Store N rows behind what is there; return all slots up to the last written one [B, G, K, D].

        Raises:
            ValueError: the slots are full.
        """
        B, N = k_BGND.shape[0], k_BGND.shape[2]
        end = max(self.lengths) + self.provisional + N
        if end > self.capacity:
            raise ValueError(f"draft slots: {end} rows needed, capacity is {self.capacity}; ask for more in new_state")
        keys_BGCD, values_BGCD = self._keys_BGCD[:B], self._values_BGCD[:B]
        if self._length_B1 is None:
            keys_BGCD[:, :, end - N : end] = k_BGND
            values_BGCD[:, :, end - N : end] = v_BGND
        else:
            batch_B1 = torch.arange(B, device=k_BGND.device)[:, None]
            slot_BN = self._length_B1 + self.provisional + torch.arange(N, device=k_BGND.device)
            keys_BGCD[batch_B1, :, slot_BN] = k_BGND.transpose(1, 2)
            values_BGCD[batch_B1, :, slot_BN] = v_BGND.transpose(1, 2)
        return keys_BGCD[:, :, :end], values_BGCD[:, :, :end]

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """All slots of the sequences that are here, [B, G, capacity, D]."""
        B = len(self.lengths)
        return self._keys_BGCD[:B], self._values_BGCD[:B]

    def next_slots(self, N: int) -> Tensor:
        """int64 [B, N]: where the next N provisional rows go.

        Raises:
            ValueError: the slots are full.
        """
        first = max(self.lengths) + self.provisional
        if first + N > self.capacity:
            raise ValueError(f"draft slots: {first + N} rows needed, capacity is {self.capacity}")
        offset_N = self.provisional + torch.arange(N, device=self._keys_BGCD.device)
        return self.length_B1 + offset_N

    @property
    def length_B1(self) -> Tensor:
        if self._length_B1 is None:
            return on_device(self.lengths, self._keys_BGCD.device)[:, None]
        return self._length_B1

    def causal_mask(self, N: int, K: int) -> Tensor:
        """bool [B or 1, 1, N, K]: N new rows see the committed ones and each other's past."""
        device = self._keys_BGCD.device
        start = self.lengths[0] if self._length_B1 is None else self._length_B1[..., None]
        last_BN1 = start + torch.arange(N, device=device)[None, :, None]
        return (torch.arange(K, device=device) <= last_BN1)[:, None]

    def tree_mask(self, ancestor_BWP: Tensor | None, W: int, K: int) -> Tensor:
        """bool [B or 1, 1, W, K]: W new rows see the committed ones and the given provisional ones behind them."""
        device, P = self._keys_BGCD.device, self.provisional + W
        if ancestor_BWP is None:
            ancestor_BWP = torch.ones(1, W, P, dtype=torch.bool, device=device)
        if self._length_B1 is None and self.lengths[0] + P == K:
            return F.pad(ancestor_BWP, (K - P, 0), value=True)[:, None]
        place_BK = torch.arange(K, device=device) - self.length_B1  # among the provisional rows
        B = place_BK.shape[0]
        index_BWK = place_BK.clamp(0, P - 1)[:, None].expand(B, W, K)
        seen_BWK = ancestor_BWP.expand(B, -1, -1).gather(2, index_BWK)
        inside_B1K = ((place_BK >= 0) & (place_BK < P))[:, None]
        return ((place_BK < 0)[:, None] | (inside_B1K & seen_BWK))[:, None]

    def join(self, other: DraftState) -> None:
        """Copy the committed rows of ``other``'s sequences behind the sequences here.

        Raises:
            ValueError: no room for them, or one of them is longer than the capacity.
        """
        assert self.provisional == other.provisional == 0, "discard the last round's tree first"
        first, end, longest = len(self.lengths), len(self.lengths) + len(other.lengths), max(other.lengths)
        if end > self.room or longest > self.capacity:
            raise ValueError(
                f"draft slots: {end} sequences of {longest} rows needed, "
                f"there is room for {self.room} of {self.capacity}"
            )
        self._keys_BGCD[first:end, :, :longest] = other._keys_BGCD[: len(other.lengths), :, :longest]
        self._values_BGCD[first:end, :, :longest] = other._values_BGCD[: len(other.lengths), :, :longest]
        self.lengths = self.lengths + other.lengths

    def select(self, order: Sequence[int]) -> None:
        """Keep the sequences ``order``, in that order (:func:`eaglelab.target.closing_order`)."""
        for new, old in moves(order):
            for slots in (self._keys_BGCD, self._values_BGCD):
                slots[new, :, : self.lengths[old]] = slots[old, :, : self.lengths[old]]
        self.lengths = [self.lengths[old] for old in order]


class SlotDrafter:
    """The decoding protocol (``prefill`` = first ``extend``, ``extend``, ``step``) for any drafter network.

    Args:
        network: a drafter (:class:`~eaglelab.drafters.feature.FeatureDrafter`), in the target's dtype.
        target: supplies embedding and head; never copied.
        taps: the target streams that ``extend`` receives, concatenated.
    """

    def __init__(self, network: DraftNetwork, target: FrozenTarget, taps: tuple[Tap, ...]) -> None:
        network.eval()
        self.network = network
        self.target = target
        self.taps = taps
        self.max_positions = network.config.max_position_embeddings

    def new_state(self, batch: int, capacity: int, room: int | None = None) -> DraftState:
        """Empty slots for ``batch`` sequences (``room`` in all) of ``capacity`` rows, provisional ones included."""
        return DraftState(self.network.config, batch, capacity, like=next(self.network.parameters()), room=room)

    @no_grad
    def extend(
        self,
        state: DraftState,
        features_BNF: Tensor,
        tokens_BN: Tensor,
        position_BN: Tensor,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Append target-derived rows: row ``t`` reads the taps of ``x_t`` and the token ``x_{t+1}``.

        Args:
            state: the slots; provisional rows must be gone.
            features_BNF: taps concatenated, F = T * d.
            tokens_BN: advanced tokens.
            position_BN: rotary position of each row, its token index ``t``.
            counts: real rows per sequence where the batch is ragged; the rest is padding.

        Returns:
            [B, N, d]; the output of row ``t`` predicts ``x_{t+2}``.
        """
        assert state.provisional == 0, "discard the last round's tree first"
        N = tokens_BN.shape[1]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = state.write(k, v)
            K = keys.shape[2]
            if N == 1 and state.uniform:
                return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            if K == N:
                return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=state.causal_mask(N, K), enable_gqa=True)

        fused_BNd = self.network.fuse(features_BNF)
        hidden_BNd = self._forward(fused_BNd, tokens_BN, position_BN, attend)
        counts = [N] * len(state.lengths) if counts is None else counts
        state.lengths = [length + count for length, count in zip(state.lengths, counts, strict=True)]
        return hidden_BNd

    def truncate(self, state: DraftState, lengths: Sequence[int]) -> None:
        """Keep at most the first ``lengths[b]`` committed rows of sequence b."""
        kept = [min(have, wanted) for have, wanted in zip(state.lengths, lengths, strict=True)]
        if kept != state.lengths:
            state.lengths = kept

    @no_grad
    def step(
        self,
        state: DraftState,
        hidden_BWd: Tensor,
        tokens_BW: Tensor,
        position_BW: Tensor,
        ancestor_BWP: Tensor | None = None,
    ) -> Tensor:
        """Forward W tree nodes as provisional rows.

        Args:
            state: the slots.
            hidden_BWd: the output of each node's parent.
            tokens_BW: each node's token.
            position_BW: committed rows + level - 1, counting the root's children as level 1.
            ancestor_BWP: bool, which provisional rows a node sees: those written earlier this round, then the W
                new ones; itself included. None: all of the earlier ones and itself (a chain, W = 1).

        Returns:
            [B, W, d].
        """
        W = tokens_BW.shape[1]
        assert ancestor_BWP is not None or W == 1
        if state.fixed or (state.compiled and len(state.lengths) == state.room):
            mask_B1WC = state.tree_mask(ancestor_BWP, W, state.capacity)
            slots_BW = state.next_slots(W)
            rows = (regular(rows) for rows in (hidden_BWd, tokens_BW, position_BW, slots_BW, mask_B1WC))
            step: Callable[..., Tensor] = self._static_step if state.fixed else self._compiled_step
            hidden_BWd = step(*rows, *state.whole)
            state.provisional += W
            return hidden_BWd
        mask = None
        if ancestor_BWP is not None or not state.uniform:
            mask = state.tree_mask(ancestor_BWP, W, max(state.lengths) + state.provisional + W)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = state.write(k, v)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        hidden_BWd = self._forward(hidden_BWd, tokens_BW, position_BW, attend)
        state.provisional += W
        return hidden_BWd

    @cached_property
    def _compiled_step(self) -> Callable[..., Tensor]:
        return torch.compile(self._static_step, dynamic=False)

    def _static_step(
        self,
        hidden_BWd: Tensor,
        tokens_BW: Tensor,
        position_BW: Tensor,
        slots_BW: Tensor,
        mask_B1WC: Tensor,
        keys_BGCD: Tensor,
        values_BGCD: Tensor,
    ) -> Tensor:
        """`step` as a function of tensors whose shapes do not depend on the lengths; C is the slots' capacity."""
        batch_B1 = torch.arange(slots_BW.shape[0], device=slots_BW.device)[:, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys_BGCD[batch_B1, :, slots_BW] = k.transpose(1, 2)
            values_BGCD[batch_B1, :, slots_BW] = v.transpose(1, 2)
            return F.scaled_dot_product_attention(q, keys_BGCD, values_BGCD, attn_mask=mask_B1WC, enable_gqa=True)

        return self._forward(hidden_BWd, tokens_BW, position_BW, attend)

    def join(self, state: DraftState, other: DraftState) -> None:
        """Append the sequences of ``other``."""
        state.join(other)

    def select(self, state: DraftState, order: Sequence[int]) -> None:
        """Keep the sequences ``order``, in that order."""
        state.select(order)

    def discard(self, state: DraftState) -> None:
        """Drop the provisional rows; committed rows stay."""
        state.provisional = 0

    @no_grad
    def log_probs(self, hidden: Tensor) -> Tensor:
        """[..., d] -> fp32 log-softmax over the draft vocabulary, at T = 1 whatever the sampling temperature."""
        return self.network.logits(hidden, self.target.lm_head).float().log_softmax(-1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids."""
        return self.network.to_target_ids(draft_ids)

    def _forward(self, state_BNd: Tensor, tokens_BN: Tensor, position_BN: Tensor, attend: Attend) -> Tensor:
        return self.network(state_BNd, self.target.embed(tokens_BN), position_BN, attend)
