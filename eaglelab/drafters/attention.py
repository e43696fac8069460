"""Rollout attention: target-derived keys and a row's own draft ancestors in one softmax.

The whole family trains one dependency graph. Root row ``r`` at rollout step ``s`` sees the target-derived keys of
rows ``<= r`` of its segment and its own draft states of steps ``1..s``; nothing else. EAGLE-1 is the case without
a draft step, HASS and EAGLE-3 index the same graph by position and by root. Own ancestors are a handful of
per-row terms: no [rows, rows * steps] matrix exists, and step ``s`` costs one more dot product per row than ``s - 1``.
Memory is linear in the rows on every device (:mod:`eaglelab.drafters.native`, and :mod:`eaglelab.drafters.flex` on
CUDA).

Letters: B sequences, R rows, U rows that ask (all, or those of a :class:`~eaglelab.data.needed.NeededRows`), H heads,
G key/value heads, D head width, s draft steps.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from eaglelab.data.needed import pick
from eaglelab.data.rows import Rows, first_seen
from eaglelab.drafters.flex import block_mask, flex_joint_attention, flex_usable
from eaglelab.drafters.joint import dense_joint_attention, joint_attention
from eaglelab.drafters.native import MASKED_ROWS, BlockedAttention, FlashAttention, NativeAttention


class SeenKeys:
    """Which native keys the rows that ask see, in the forms that kernels read; each is made once, when it is asked for.

    Args:
        rows: the plan.
        slot_BU: int64, ascending: the row slots that ask; None: all.
        spans: see :class:`~eaglelab.drafters.native.BlockedAttention`.
    """

    def __init__(
        self, rows: Rows, slot_BU: Tensor | None = None, spans: tuple[list[int], list[int]] | None = None
    ) -> None:
        self._rows = rows
        self._slot_BU = slot_BU
        self._spans = spans
        self._bias: Tensor | None = None
        self._blocks: BlockedAttention | None = None
        self._block_mask: BlockMask | None = None

    @property
    def plain(self) -> bool:
        """Every row asks, and plain causal attention is segment-isolated."""
        return self._rows.causal and self._slot_BU is None

    @property
    def masked(self) -> bool:
        """Packed rows so short that a mask of all their pairs is small."""
        return not self._rows.causal and self._rows.legal_BR.shape[1] <= MASKED_ROWS

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Additive [B, 1, U, R], or None where plain causal attention will do."""
        if self.plain:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            hidden_BUR = ~pick(self._rows.visible(), self._slot_BU)
            self._bias = torch.zeros(hidden_BUR.shape, dtype=dtype, device=hidden_BUR.device)
            self._bias = self._bias.masked_fill_(hidden_BUR, -torch.inf)[:, None]
        return self._bias

    def kernel(self, q_BHUD: Tensor) -> NativeAttention:
        """PyTorch's operations for these queries."""
        if q_BHUD.device.type == "cpu" and (self.plain or self.masked):
            return FlashAttention(self.bias(q_BHUD.dtype))
        return self._in_blocks()

    def block_mask(self) -> BlockMask:
        """For :func:`~eaglelab.drafters.flex.flex_joint_attention`."""
        if self._block_mask is None:
            seen = self._in_blocks()
            self._block_mask = block_mask(seen.start_BR, seen.last_BR, *self._rows.legal_BR.shape)
        return self._block_mask

    def _in_blocks(self) -> BlockedAttention:
        if self._blocks is None:
            start_BU = pick(first_seen(self._rows), self._slot_BU)
            start_BU = start_BU[:1] * 0 if self._rows.causal else start_BU
            self._blocks = BlockedAttention(start_BU, self._slot_BU, self._spans)
        return self._blocks


class RolloutContext:
    """The keys of one training pass over a batch's rows.

    ``native`` is the ``attend`` of the target-derived rows and must come first; every call of ``own`` adds one
    draft step per root and attends from it. Gradients flow to all keys. Keys that were computed elsewhere come in with
    ``add_native`` and ``add_own``; ``attend`` asks those that are there.

    Args:
        rows: the plan; keys and values of ``native`` are of all its rows.
        slot_BU: int64, ascending: the row slots that queries come from, and that draft steps exist for; None: all.
        spans: see :class:`~eaglelab.drafters.native.BlockedAttention`.
    """

    def __init__(
        self, rows: Rows, slot_BU: Tensor | None = None, spans: tuple[list[int], list[int]] | None = None
    ) -> None:
        self._rows = rows
        self._seen = SeenKeys(rows, slot_BU, spans)
        self._native: tuple[Tensor, Tensor] | None = None
        self._spread: list[Tensor] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    def native(self, q_BHRD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
        """Causal, segment-isolated attention among the rows. Keeps their keys for the steps that follow."""
        self.add_native(k_BGRD, v_BGRD)
        return self.attend(q_BHRD)

    def own(self, q_BHRD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
        """Attention of the next draft step of every root; its own new key is visible to itself."""
        self.add_own(k_BGRD, v_BGRD)
        return self.attend(q_BHRD)

    def add_native(self, k_BGRD: Tensor, v_BGRD: Tensor) -> None:
        """Keys and values of the target-derived rows."""
        assert self._native is None, "one native pass per context"
        self._native = k_BGRD, v_BGRD

    def add_own(self, k_BGRD: Tensor, v_BGRD: Tensor) -> None:
        """Keys and values of one draft step of every root."""
        assert self._native is not None, "the native pass comes first"
        self._own.append((k_BGRD, v_BGRD))

    def branch(self) -> RolloutContext:
        """A context with the same keys, to which others can be added; what the rows see is worked out once for both.

        For a step that is computed again, and for passes over the same rows.
        """
        other = copy.copy(self)
        other._spread, other._own = list(self._spread), list(self._own)
        return other

    @property
    def newest(self) -> tuple[Tensor, Tensor]:
        """Keys and values that were added last."""
        assert self._native is not None
        return self._own[-1] if self._own else self._native

    def attend(self, q_BHUD: Tensor) -> Tensor:
        """Attention from the newest step of every root to the keys that were added: [B, H, U, D]."""
        assert self._native is not None
        seen, alone = self._seen, not self._own
        if not (alone and seen.plain) and flex_usable(q_BHUD, self._native[0]):
            own_k, own_v = ([pair[i] for pair in self._own] for i in (0, 1))
            return flex_joint_attention(q_BHUD, *self._native, own_k, own_v, seen.block_mask())
        k, v, own_k, own_v = self._spread_keys(q_BHUD)
        if alone and (seen.plain or seen.masked):
            mask = seen.bias(q_BHUD.dtype)
            return F.scaled_dot_product_attention(q_BHUD, k, v, attn_mask=mask, is_causal=mask is None)
        return joint_attention(q_BHUD, k, v, own_k, own_v, seen.kernel(q_BHUD))

    def _spread_keys(self, q_BHUD: Tensor) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Native k, v [B, H, R, D] and own k, v, one [B, H, U, D] per step, heads repeated to those of the queries.

        Each is spread once, whatever the number of steps.
        """
        assert self._native is not None
        repeat = q_BHUD.shape[1] // self._native[0].shape[1]
        for pair in [self._native, *self._own][len(self._spread) // 2 :]:
            self._spread += [x_BG if repeat == 1 else x_BG.repeat_interleave(repeat, dim=1) for x_BG in pair]
        native_k, native_v, *own = self._spread
        return native_k, native_v, own[::2], own[1::2]


class ShippedContext(RolloutContext):
    """The published HASS arithmetic, an ablation: hidden slots keep probability mass.

    The published code multiplies the scores of hidden columns by zero before the softmax instead of hiding them, so
    that each of them weighs exp(0) and draws the output towards zero; decoding does no such thing. A row at column
    ``t`` of ``columns`` has ``columns - 1 - t`` of them, padding included.

    Args:
        rows: the plan; one segment per sequence (``data.packing=false``), as in the published trainer.
        columns: tokens per padded sequence.

    Raises:
        ValueError: packed rows.
    """

    def __init__(self, rows: Rows, columns: int) -> None:
        super().__init__(rows)
        if not rows.causal:
            raise ValueError("alignment=shipped is defined for unpacked samples only; set data.packing=false")
        self._columns = columns

    def attend(self, q_BHRD: Tensor) -> Tensor:
        position_BR = self._rows.position_BR + len(self._own)
        hidden_BR = (self._columns - 1 - position_BR).clamp(min=0)
        k, v, own_k, own_v = self._spread_keys(q_BHRD)
        none = k[:, :, :, None][:, :, :, :0]
        own_k_BHRsD, own_v_BHRsD = (torch.stack(x, dim=3) if x else none for x in (own_k, own_v))
        return dense_joint_attention(q_BHRD, k, v, own_k_BHRsD, own_v_BHRsD, None, hidden_BR)
