"""Rollout attention: target-derived keys and a row's own draft ancestors in one softmax.

The whole family trains one dependency graph. Root row ``r`` at rollout step ``s`` sees the target-derived keys of
rows ``<= r`` of its segment and its own draft states of steps ``1..s``; nothing else. EAGLE-1 is the case without
a draft step, HASS and EAGLE-3 index the same graph by position and by root. Own ancestors are a handful of
per-row terms, so no [rows, rows * steps] matrix exists and step ``s`` costs one more dot product per row than ``s - 1``.

Letters: B sequences, R rows, H heads, G key/value heads, D head width, s draft steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglelab.data.rows import Rows

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class RolloutContext:
    """The keys of one training pass over a batch's rows.

    ``native`` is the ``attend`` of the target-derived rows and must come first; every call of ``own`` adds one
    draft step per root and attends from it. Gradients flow to all keys.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._bias: Tensor | None = None
        self._native: tuple[Tensor, Tensor] | None = None
        self._own: list[tuple[Tensor, Tensor]] = []

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        """Additive [B, 1, R, R], or None where plain causal attention is already segment-isolated."""
        if self._rows.causal:
            return None
        if self._bias is None or self._bias.dtype != dtype:
            hidden_BRR = ~self._rows.visible()
            self._bias = torch.zeros(hidden_BRR.shape, dtype=dtype, device=hidden_BRR.device)
            self._bias = self._bias.masked_fill_(hidden_BRR, -torch.inf)[:, None]
        return self._bias

    def native(self, q_BHRD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
        """Causal, segment-isolated attention among the rows. Keeps their keys for the steps that follow."""
        assert self._native is None, "one native pass per context"
        self._native = k, v = _spread(q_BHRD, k_BGRD), _spread(q_BHRD, v_BGRD)
        mask = self._mask(q_BHRD.dtype)
        return F.scaled_dot_product_attention(q_BHRD, k, v, attn_mask=mask, is_causal=mask is None)

    def own(self, q_BHRD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor) -> Tensor:
        """Attention of the next draft step of every root; its own new key is visible to itself."""
        assert self._native is not None, "the native pass comes first"
        self._own.append((_spread(q_BHRD, k_BGRD), _spread(q_BHRD, v_BGRD)))
        own_k = torch.stack([k for k, _ in self._own], dim=3)  # [B, H, R, s, D]
        own_v = torch.stack([v for _, v in self._own], dim=3)
        return joint_attention(q_BHRD, *self._native, own_k, own_v, self._mask(q_BHRD.dtype))


def joint_attention(
    q_BHRD: Tensor, k_BHRD: Tensor, v_BHRD: Tensor, own_k_BHRsD: Tensor, own_v_BHRsD: Tensor, bias: Tensor | None
) -> Tensor:
    """One softmax over the causal native keys and each row's own keys.

    Args:
        q_BHRD, k_BHRD, v_BHRD: queries and native keys, values; heads already spread.
        own_k_BHRsD, own_v_BHRsD: s keys and values per row, visible to that row only.
        bias: additive [B, 1, R, R] mask of the native part; None means causal.

    Returns:
        [B, H, R, D], differentiable in all inputs but ``bias``.
    """
    if q_BHRD.device.type == "cpu":
        return _JointAttention.apply(q_BHRD, k_BHRD, v_BHRD, own_k_BHRsD, own_v_BHRsD, bias)
    R = q_BHRD.shape[2]
    if bias is None:
        hidden = torch.ones(R, R, dtype=torch.bool, device=q_BHRD.device).triu(1)
        bias = torch.zeros(R, R, dtype=q_BHRD.dtype, device=q_BHRD.device).masked_fill_(hidden, -torch.inf)
    scale = q_BHRD.shape[-1] ** -0.5
    native = (q_BHRD @ k_BHRD.mT) * scale + bias
    own = torch.einsum("bhrd,bhrsd->bhrs", q_BHRD, own_k_BHRsD) * scale
    weight = torch.cat((native, own), dim=-1).softmax(-1, dtype=torch.float32).to(q_BHRD.dtype)
    return weight[..., :R] @ v_BHRD + torch.einsum("bhrs,bhrsd->bhrd", weight[..., R:], own_v_BHRsD)


class _JointAttention(torch.autograd.Function):
    """Flash attention over the native keys, merged with the own keys by log-sum-exp.

    The backward of a flash kernel needs only the output and the log-sum-exp of the *whole* softmax: handed the
    merged ones, it returns exactly the native part of the joint gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, bias: Tensor | None) -> Tensor:
        ctx.scale = q.shape[-1] ** -0.5
        native, native_lse = _flash(q, k, v, 0.0, bias is None, attn_mask=bias, scale=ctx.scale)
        own_score = torch.einsum("bhrd,bhrsd->bhrs", q, own_k).to(native_lse.dtype) * ctx.scale
        lse = torch.logaddexp(native_lse, own_score.logsumexp(-1))
        out = native * (native_lse - lse).exp()[..., None].to(q.dtype)
        out += torch.einsum("bhrs,bhrsd->bhrd", (own_score - lse[..., None]).exp().to(q.dtype), own_v)
        ctx.save_for_backward(q, k, v, own_k, own_v, bias, own_score, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, bias, own_score, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = _flash_backward(
            grad_out, q, k, v, out, lse, 0.0, bias is None, attn_mask=bias, scale=ctx.scale
        )
        weight = (own_score - lse[..., None]).exp()
        inner = torch.einsum("bhrd,bhrsd->bhrs", grad_out, own_v) - (grad_out * out).sum(-1, keepdim=True)
        grad_score = (weight * inner).to(q.dtype) * ctx.scale
        grad_q = grad_q + torch.einsum("bhrs,bhrsd->bhrd", grad_score, own_k)
        grad_own_k = grad_score[..., None] * q[..., None, :]
        grad_own_v = weight.to(q.dtype)[..., None] * grad_out[..., None, :]
        return grad_q, grad_k, grad_v, grad_own_k, grad_own_v, None


def _spread(q_BHRD: Tensor, kv_BGRD: Tensor) -> Tensor:
    """Repeat key/value heads to the number of query heads."""
    return kv_BGRD.repeat_interleave(q_BHRD.shape[1] // kv_BGRD.shape[1], dim=1)
