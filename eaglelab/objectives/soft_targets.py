"""Cross entropy between logits and given distributions, whose gradient is formed in the memory of the logits.

Letters: m rows of a chunk, S rollout steps, V vocabulary, K top tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eaglelab.kernels import Kernel

TopK = tuple[Tensor, Tensor]
MOST_TOP = 4096
"""K that the kernel takes; a row's top tokens are held all at once."""


def soft_cross_entropy(
    logit_mSV: Tensor, q_mV: Tensor, weight_mS: Tensor, top_mK: TopK | None = None, top_weight: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of ``-sum_v q(v) log p(v)`` over rows, and what it is made of.

    There is one [m, S, V] and one [m, V], no third: logits become probabilities become gradients.

    Args:
        logit_mSV: of a type that :func:`as_taken` gives, written over: nobody may read them afterwards.
        q_mV: distributions, one for all S steps; each adds up to 1.
        weight_mS: of the sums over the whole vocabulary.
        top_mK: probabilities and ids of K different tokens, whose ``-q log p`` counts with ``top_weight`` as well;
            for S = 1.

    Returns:
        The weighted sum (a scalar, differentiable in the logits); per row without weights the sum over the vocabulary
        [m, S] and over the K tokens [m, S].
    """
    fits = top_mK is None or top_mK[1].shape[-1] <= MOST_TOP
    fused = fits and KERNEL.usable(logit_mSV.device, logit_mSV.dtype)
    with torch.autocast(logit_mSV.device.type, enabled=False):  # mixed precision would round q and x for their product
        if not fused:
            logit_mSV = logit_mSV.to(q_mV.dtype)
        return differentiable(load_kernel() if fused else BY_TORCH, logit_mSV, q_mV, weight_mS, top_mK, top_weight)


def as_taken(logit: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits for :func:`soft_cross_entropy`: of their own type where its kernel reads it, else of the distributions'.

    The gradient has the same type; a kernel computes it in fp32, as a conversion behind it would have seen it.
    """
    return logit if KERNEL.usable(logit.device, logit.dtype) else logit.to(dtype)


@dataclass(frozen=True)
class Implementation:
    """One way to compute the loss.

    Attributes:
        terms: (logits, distributions, weights, top tokens or None, their weight, whether a gradient is wanted) -> the
            sums of every row over the vocabulary [m, S] and over its top tokens [m, S], without weights, and the
            gradient [m, S, V] of the weighted sum, in the memory of the logits, or None.
        multiply_: (such a gradient, a scalar tensor) -> their product in the same memory.
    """

    terms: Callable[[Tensor, Tensor, Tensor, TopK | None, float, bool], tuple[Tensor, Tensor, Tensor | None]]
    multiply_: Callable[[Tensor, Tensor], Tensor]


def terms_by_torch(
    logit_mSV: Tensor, q_mV: Tensor, weight_mS: Tensor, top_mK: TopK | None, top_weight: float, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :class:`Implementation`; logits and distributions have one type."""
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
    if not gradient:
        return soft_mS, top_mS, None
    grad_mSV = p_mSV.mul_(scale_mS[..., None] / mass_mS1)
    grad_mSV.addcmul_(weight_mS[..., None], q_mV[:, None], value=-1)
    if top_mK is not None:
        grad_mSV.scatter_add_(-1, id_m1K, -top_weight * q_m1K)
    return soft_mS, top_mS, grad_mSV


BY_TORCH = Implementation(terms_by_torch, Tensor.mul_)


def load_kernel() -> Implementation:
    """The kernel; its compiler is imported here and not before.

    Raises:
        ImportError: Triton is not installed.
    """
    from eaglelab.kernels.soft_targets import multiply_, soft_target_terms

    return Implementation(soft_target_terms, multiply_)


def differentiable(
    implementation: Implementation,
    logit_mSV: Tensor,
    q_mV: Tensor,
    weight_mS: Tensor,
    top_mK: TopK | None = None,
    top_weight: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`soft_cross_entropy` by the given implementation."""
    return _SoftCrossEntropy.apply(implementation, logit_mSV, q_mV, weight_mS, top_mK, top_weight)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        implementation: Implementation,
        logit_mSV: Tensor,
        q_mV: Tensor,
        weight_mS: Tensor,
        top_mK: TopK | None,
        top_weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        soft_mS, top_mS, ctx.grad_mSV = implementation.terms(
            logit_mSV, q_mV, weight_mS, top_mK, top_weight, ctx.needs_input_grad[1]
        )
        ctx.multiply_ = implementation.multiply_
        ctx.mark_non_differentiable(soft_mS, top_mS)
        return (weight_mS * soft_mS).sum() + top_weight * top_mS.sum(), soft_mS, top_mS

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *measured: Tensor) -> tuple[Tensor | None, ...]:
        grad_mSV, ctx.grad_mSV = ctx.multiply_(ctx.grad_mSV, grad), None
        return None, grad_mSV, None, None, None, None


def _disagreement(device: torch.device, dtype: torch.dtype) -> float:
    """Of the kernel from the same sums in fp64; relative to the largest number of each result."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for m, S, V, K in ((5, 3, 9_001, 0), (3, 1, 8_192, 7), (2, 2, 640, 0), (4, 1, 77, 77)):
        logit_mSV, taught_mV = (3 * torch.randn(*shape, generator=generator) for shape in ((m, S, V), (m, V)))
        weight_mS = torch.rand(m, S, generator=generator)
        weight_mS[0] = 0.0
        q_mV = taught_mV.softmax(-1)
        given = (logit_mSV.to(dtype), q_mV, weight_mS, *(q_mV.topk(K) if K else ()))
        logit_mSV, q_mV, weight_mS, *top_mK = (x.to(device) for x in given)
        exact = (logit_mSV.double(), q_mV.double(), weight_mS.double(), *(x.double() for x in top_mK[:1]), *top_mK[1:])
        found, expected = _results(load_kernel(), logit_mSV, q_mV, weight_mS, *top_mK), _results(BY_TORCH, *exact)
        for one, other in zip(found, expected, strict=True):
            difference = (one.double() - other).abs().max() / other.abs().max().clamp_min(1e-30)
            worst = max(worst, difference.nan_to_num(nan=torch.inf).item())
    return worst


def _results(
    implementation: Implementation, logit_mSV: Tensor, q_mV: Tensor, weight_mS: Tensor, *top_mK: Tensor
) -> tuple[Tensor, ...]:
    """The loss's terms alone, then loss, terms and the gradient of a multiple of it."""
    top = (top_mK[0], top_mK[1]) if top_mK else None
    weights = weight_mS, top, 0.7 if top else 0.0
    alone = differentiable(implementation, logit_mSV.clone(), q_mV, *weights)
    logit_mSV.requires_grad_()
    loss, *terms = differentiable(implementation, logit_mSV, q_mV, *weights)
    (gradient_mSV,) = torch.autograd.grad(loss * 3, logit_mSV)
    return *alone, loss.detach(), *terms, gradient_mSV


KERNEL = Kernel(
    name="the fused soft cross entropy",
    supports=lambda device, dtype: device.type == "cuda" and dtype in (torch.float32, torch.bfloat16, torch.float16),
    disagreement=_disagreement,
    bound=lambda dtype: max(1e-5, 2 * torch.finfo(dtype).eps),
)
