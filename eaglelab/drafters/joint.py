"""Native keys and a row's own draft ancestors in one softmax, whatever computes the native part.

Letters: B sequences, R rows, U rows that ask, H heads, D head width, s draft steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eaglelab.drafters.native import NativeAttention


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
