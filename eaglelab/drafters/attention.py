"""Rollout attention: target-derived keys and a row's own draft ancestors in one softmax.

The whole family trains one dependency graph. Root row ``r`` at rollout step ``s`` sees the target-derived keys of
rows ``<= r`` of its segment and its own draft states of steps ``1..s``; nothing else. EAGLE-1 is the case without
a draft step, HASS and EAGLE-3 index the same graph by position and by root. Own ancestors are a handful of
per-row terms: no [rows, rows * steps] matrix exists, and step ``s`` costs one more dot product per row than ``s - 1``.
Memory is linear in the rows on every device (:mod:`eaglelab.drafters.native`).

Letters: B sequences, R rows, U rows that ask (all, or those of a :class:`~eaglelab.data.needed.NeededRows`), H heads,
G key/value heads, D head width, s draft steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglelab.data.needed import pick
from eaglelab.data.rows import Rows, first_seen
from eaglelab.drafters.native import MASKED_ROWS, BlockedAttention, FlashAttention, NativeAttention


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
        self._slot_BU = slot_BU
        self._spans = spans
        self._bias: Tensor | None = None
        self._blocks: BlockedAttention | None = None
        self._native: tuple[Tensor, Tensor] | None = None
        self._spread: list[Tensor] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    @property
    def _plain(self) -> bool:
        """Every row asks, and plain causal attention is segment-isolated."""
        return self._rows.causal and self._slot_BU is None

    @property
    def _masked(self) -> bool:
        """Packed rows so short that a mask of all their pairs is small."""
        return not self._rows.causal and self._rows.legal_BR.shape[1] <= MASKED_ROWS

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        """Additive [B, 1, U, R], or None where plain causal attention will do."""
        if self._plain:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            hidden_BUR = ~pick(self._rows.visible(), self._slot_BU)
            self._bias = torch.zeros(hidden_BUR.shape, dtype=dtype, device=hidden_BUR.device)
            self._bias = self._bias.masked_fill_(hidden_BUR, -torch.inf)[:, None]
        return self._bias

    def _kernel(self, q_BHUD: Tensor) -> NativeAttention:
        if q_BHUD.device.type == "cpu" and (self._plain or self._masked):
            return FlashAttention(self._mask(q_BHUD.dtype))
        if self._blocks is None:
            self._blocks = self._blocks_of_rows()
        return self._blocks

    def _blocks_of_rows(self) -> BlockedAttention:
        start_BU = pick(first_seen(self._rows), self._slot_BU)
        return BlockedAttention(start_BU[:1] * 0 if self._rows.causal else start_BU, self._slot_BU, self._spans)

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
        """A context with the same keys, to which others can be added; for a step that is computed again."""
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
        k, v, own_k, own_v = self._spread_keys(q_BHUD)
        if not self._own and (self._plain or self._masked):
            mask = self._mask(q_BHUD.dtype)
            return F.scaled_dot_product_attention(q_BHUD, k, v, attn_mask=mask, is_causal=mask is None)
        return joint_attention(q_BHUD, k, v, own_k, own_v, self._kernel(q_BHUD))

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


def joint_attention(
    q_BHUD: Tensor,
    k_BHRD: Tensor,
    v_BHRD: Tensor,
    own_k: Sequence[Tensor],
    own_v: Sequence[Tensor],
    native: NativeAttention,
) -> Tensor:
    """One softmax over the native keys that ``native`` shows and each row's own keys.

    Args:
        q_BHUD: queries.
        k_BHRD, v_BHRD: native keys, values; heads already spread.
        own_k, own_v: for each draft step keys and values [B, H, U, D], visible to the row's own query only.
        native: which native keys a query sees, and the kernel for them.

    Returns:
        [B, H, U, D], differentiable in all tensors.
    """
    out: Tensor = _JointAttention.apply(native, q_BHUD, k_BHRD, v_BHRD, *own_k, *own_v)
    return out


def dense_joint_attention(
    q_BHRD: Tensor,
    k_BHRD: Tensor,
    v_BHRD: Tensor,
    own_k_BHRsD: Tensor,
    own_v_BHRsD: Tensor,
    bias: Tensor | None,
    empty_BR: Tensor | None = None,
) -> Tensor:
    """:func:`joint_attention` with all its [R, R + s] scores in one matrix: memory quadratic in R.

    Args:
        bias: additive [B, 1, R, R] mask of the native part; None means causal.
        empty_BR: that many further slots per row, with score 0 and value 0 (see :class:`ShippedContext`).
    """
    R, scale = q_BHRD.shape[2], q_BHRD.shape[-1] ** -0.5
    if bias is None:
        future_RR = torch.ones(R, R, dtype=torch.bool, device=q_BHRD.device).triu(1)
        bias = torch.zeros(R, R, dtype=q_BHRD.dtype, device=q_BHRD.device).masked_fill_(future_RR, -torch.inf)
    scores = [(q_BHRD @ k_BHRD.mT) * scale + bias]
    scores.append(torch.einsum("bhrd,bhrsd->bhrs", q_BHRD, own_k_BHRsD) * scale)
    if empty_BR is not None:
        scores.append(empty_BR.to(q_BHRD.dtype).log()[:, None, :, None].expand(-1, q_BHRD.shape[1], -1, -1))
    weight = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.promote_types(q_BHRD.dtype, torch.float32))
    native, own = weight.to(q_BHRD.dtype)[..., : R + own_k_BHRsD.shape[3]].split([R, own_k_BHRsD.shape[3]], dim=-1)
    return native @ v_BHRD + torch.einsum("bhrs,bhrsd->bhrd", own, own_v_BHRsD)


class _JointAttention(torch.autograd.Function):
    """Attention over the native keys, merged with the own keys by log-sum-exp.

    The backward of the native part needs only the output and the log-sum-exp of the *whole* softmax: handed the merged
    ones, it returns exactly its part of the joint gradient.
    """

    @staticmethod
    def forward(ctx: Any, native: NativeAttention, q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        ctx.native, ctx.scale = native, q.shape[-1] ** -0.5
        own_k, own_v = own[: len(own) // 2], own[len(own) // 2 :]
        out, lse = native.forward(q, k, v)
        weight_s: list[Tensor] = []
        if own:
            score_s = torch.stack([(q * key).sum(-1, dtype=lse.dtype) * ctx.scale for key in own_k])
            whole = torch.logaddexp(lse, score_s.logsumexp(0))
            out = out * (lse - whole).exp()[..., None].to(q.dtype)
            weight_s = list((score_s - whole).exp_())
            for weight, value in zip(weight_s, own_v, strict=True):
                out.addcmul_(weight[..., None].to(q.dtype), value)
            lse = whole
        ctx.save_for_backward(q, k, v, out, lse, *own, *weight_s)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *own = ctx.saved_tensors
        steps = len(own) // 3
        grad_q, grad_k, grad_v = ctx.native.backward(grad_out, q, k, v, out, lse)
        grad_own_k, grad_own_v = [], []
        mean = (grad_out * out).sum(-1, dtype=lse.dtype) if steps else None
        for key, value, weight in zip(own[:steps], own[steps : 2 * steps], own[2 * steps :], strict=True):
            inner = (grad_out * value).sum(-1, dtype=lse.dtype) - mean
            grad_score = (weight * inner * ctx.scale).to(q.dtype)[..., None]
            grad_q = grad_q + grad_score * key
            grad_own_k.append(grad_score * q)
            grad_own_v.append(weight.to(q.dtype)[..., None] * grad_out)
        return None, grad_q, grad_k, grad_v, *grad_own_k, *grad_own_v
