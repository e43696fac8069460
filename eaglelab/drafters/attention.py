"""Rollout attention: target-derived keys and a row's own draft ancestors in one softmax.

The whole family trains one dependency graph. Root row ``r`` at rollout step ``s`` sees the target-derived keys of
rows ``<= r`` of its segment and its own draft states of steps ``1..s``; nothing else. EAGLE-1 is the case without
a draft step, HASS and EAGLE-3 index the same graph by position and by root. Own ancestors are a handful of
per-row terms: no [rows, rows * steps] matrix exists, and step ``s`` costs one more dot product per row than ``s - 1``.
Memory is linear in the rows on every device (:mod:`eaglelab.drafters.native`).

Letters: B sequences, R rows, H heads, G key/value heads, D head width, s draft steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglelab.data.rows import Rows
from eaglelab.drafters.native import MASKED_ROWS, BlockedAttention, FlashAttention, NativeAttention, first_seen


class RolloutContext:
    """The keys of one training pass over a batch's rows.

    ``native`` is the ``attend`` of the target-derived rows and must come first; every call of ``own`` adds one
    draft step per root and attends from it. Gradients flow to all keys. A pass that only needs the *keys* of
    earlier steps gives them with ``add_native`` and ``add_own``.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._bias: Tensor | None = None
        self._blocks: BlockedAttention | None = None
        self._native: tuple[Tensor, Tensor] | None = None
        self._spread: list[Tensor] = []
        self._own: list[tuple[Tensor, Tensor]] = []

    @property
    def _masked(self) -> bool:
        """Packed rows so short that a mask of all their pairs is small."""
        return not self._rows.causal and self._rows.legal_BR.shape[1] <= MASKED_ROWS

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        """Additive [B, 1, R, R], or None where plain causal attention is already segment-isolated."""
        if self._rows.causal:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            hidden_BRR = ~self._rows.visible()
            self._bias = torch.zeros(hidden_BRR.shape, dtype=dtype, device=hidden_BRR.device)
            self._bias = self._bias.masked_fill_(hidden_BRR, -torch.inf)[:, None]
        return self._bias

    def _kernel(self, q_BHRD: Tensor) -> NativeAttention:
        if q_BHRD.device.type == "cpu" and (self._rows.causal or self._masked):
            return FlashAttention(self._mask(q_BHRD.dtype))
        if self._blocks is None:
            start_BR = first_seen(self._rows)
            self._blocks = BlockedAttention(torch.zeros_like(start_BR[:1]) if self._rows.causal else start_BR)
        return self._blocks

    def native(self, q_BHRD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
        """Causal, segment-isolated attention among the rows. Keeps their keys for the steps that follow."""
        self.add_native(k_BGRD, v_BGRD)
        return self._attend(q_BHRD)

    def own(self, q_BHRD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
        """Attention of the next draft step of every root; its own new key is visible to itself."""
        self.add_own(k_BGRD, v_BGRD)
        return self._attend(q_BHRD)

    def add_native(self, k_BGRD: Tensor, v_BGRD: Tensor) -> None:
        """Keys and values of the target-derived rows."""
        assert self._native is None, "one native pass per context"
        self._native = k_BGRD, v_BGRD

    def add_own(self, k_BGRD: Tensor, v_BGRD: Tensor) -> None:
        """Keys and values of one draft step of every root."""
        assert self._native is not None, "the native pass comes first"
        self._own.append((k_BGRD, v_BGRD))

    def _attend(self, q_BHRD: Tensor) -> Tensor:
        k, v, own_k, own_v = self._spread_keys(q_BHRD)
        if not self._own and (self._rows.causal or self._masked):
            mask = self._mask(q_BHRD.dtype)
            return F.scaled_dot_product_attention(q_BHRD, k, v, attn_mask=mask, is_causal=mask is None)
        return joint_attention(q_BHRD, k, v, own_k, own_v, self._kernel(q_BHRD))

    def _spread_keys(self, q_BHRD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Native k, v [B, H, R, D] and own k, v [B, H, R, s, D], heads repeated to those of the queries."""
        assert self._native is not None
        repeat = q_BHRD.shape[1] // self._native[0].shape[1]

        def spread(x_BG: Tensor) -> Tensor:
            return x_BG if repeat == 1 else x_BG.repeat_interleave(repeat, dim=1)

        self._spread = self._spread or [spread(x) for x in self._native]  # one copy, whatever the number of steps
        native_k, native_v = self._spread
        none = native_k[:, :, :, None][:, :, :, :0]
        own = [spread(torch.stack(x, dim=3)) for x in zip(*self._own, strict=True)]
        own_k, own_v = own or (none, none)
        return native_k, native_v, own_k, own_v


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

    def _attend(self, q_BHRD: Tensor) -> Tensor:
        position_BR = self._rows.position_BR + len(self._own)
        hidden_BR = (self._columns - 1 - position_BR).clamp(min=0)
        return dense_joint_attention(q_BHRD, *self._spread_keys(q_BHRD), None, hidden_BR)


def joint_attention(
    q_BHRD: Tensor,
    k_BHRD: Tensor,
    v_BHRD: Tensor,
    own_k_BHRsD: Tensor,
    own_v_BHRsD: Tensor,
    native: NativeAttention,
) -> Tensor:
    """One softmax over the native keys that ``native`` shows and each row's own keys.

    Args:
        q_BHRD, k_BHRD, v_BHRD: queries and native keys, values; heads already spread.
        own_k_BHRsD, own_v_BHRsD: s keys and values per row, visible to that row only.
        native: which native keys a row sees, and the kernel for them.

    Returns:
        [B, H, R, D], differentiable in all tensors.
    """
    out: Tensor = _JointAttention.apply(q_BHRD, k_BHRD, v_BHRD, own_k_BHRsD, own_v_BHRsD, native)
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
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, native: NativeAttention
    ) -> Tensor:
        ctx.native, ctx.scale = native, q.shape[-1] ** -0.5
        native_out, native_lse = native.forward(q, k, v)
        own_score = torch.einsum("bhrd,bhrsd->bhrs", q, own_k).to(native_lse.dtype) * ctx.scale
        lse = torch.logaddexp(native_lse, own_score.logsumexp(-1))
        out = native_out * (native_lse - lse).exp()[..., None].to(q.dtype)
        out += torch.einsum("bhrs,bhrsd->bhrd", (own_score - lse[..., None]).exp().to(q.dtype), own_v)
        ctx.save_for_backward(q, k, v, own_k, own_v, own_score, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, own_score, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = ctx.native.backward(grad_out, q, k, v, out, lse)
        weight = (own_score - lse[..., None]).exp()
        inner = torch.einsum("bhrd,bhrsd->bhrs", grad_out, own_v) - (grad_out * out).sum(-1, keepdim=True)
        grad_score = (weight * inner).to(q.dtype) * ctx.scale
        grad_q = grad_q + torch.einsum("bhrs,bhrsd->bhrd", grad_score, own_k)
        grad_own_k = grad_score[..., None] * q[..., None, :]
        grad_own_v = weight.to(q.dtype)[..., None] * grad_out[..., None, :]
        return grad_q, grad_k, grad_v, grad_own_k, grad_own_v, None
