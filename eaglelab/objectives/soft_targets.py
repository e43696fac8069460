"""Cross entropy between logits and given distributions, whose gradient is formed in the memory of the logits.

Letters: m rows of a chunk, S rollout steps, V vocabulary, K top tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TopK = tuple[Tensor, Tensor]


def soft_cross_entropy(
    logit_mSV: Tensor, q_mV: Tensor, weight_mS: Tensor, top_mK: TopK | None = None, top_weight: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of ``-sum_v q(v) log p(v)`` over rows, and what it is made of.

    There is one [m, S, V] and one [m, V], no third: logits become probabilities become gradients.

    Args:
        logit_mSV: fp32 or wider, written over: nobody may read them afterwards.
        q_mV: distributions, one for all S steps; each adds up to 1.
        weight_mS: of the sums over the whole vocabulary.
        top_mK: probabilities and ids of K tokens whose ``-q log p`` counts with ``top_weight`` as well; S = 1.

    Returns:
        The weighted sum (a scalar, differentiable in the logits); per row without weights the sum over the vocabulary
        [m, S] and over the K tokens [m, S].
    """
    with torch.autocast(logit_mSV.device.type, enabled=False):  # mixed precision would round q and x for their product
        return _SoftCrossEntropy.apply(logit_mSV, q_mV, weight_mS, top_mK, top_weight)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logit_mSV: Tensor, q_mV: Tensor, weight_mS: Tensor, top_mK: TopK | None, top_weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_mSV = logit_mSV.sub_(logit_mSV.amax(-1, keepdim=True))
        taught_mS = (x_mSV @ q_mV[..., None]).squeeze(-1)  # sum of q x
        if top_mK is not None:
            q_m1K, id_m1K = (x_mK[:, None] for x_mK in top_mK)
            top_taught_mS = (q_m1K * x_mSV.gather(-1, id_m1K)).sum(-1)
        p_mSV = x_mSV.exp_()
        mass_mS1 = p_mSV.sum(-1, keepdim=True)
        lse_mS = mass_mS1.squeeze(-1).log()
        soft_mS, top_mS, scale_mS = lse_mS - taught_mS, torch.zeros_like(lse_mS), weight_mS
        if top_mK is not None:
            mass_m1 = q_m1K.sum(-1)
            top_mS = lse_mS * mass_m1 - top_taught_mS
            scale_mS = weight_mS + top_weight * mass_m1
        if ctx.needs_input_grad[0]:
            grad_mSV = p_mSV.mul_(scale_mS[..., None] / mass_mS1)
            grad_mSV.addcmul_(weight_mS[..., None], q_mV[:, None], value=-1)
            if top_mK is not None:
                grad_mSV.scatter_add_(-1, id_m1K, -top_weight * q_m1K)
            ctx.grad_mSV = grad_mSV
        ctx.mark_non_differentiable(soft_mS, top_mS)
        return (weight_mS * soft_mS).sum() + top_weight * top_mS.sum(), soft_mS, top_mS

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *measured: Tensor) -> tuple[Tensor | None, ...]:
        grad_mSV, ctx.grad_mSV = ctx.grad_mSV.mul_(grad), None
        return grad_mSV, None, None, None, None
