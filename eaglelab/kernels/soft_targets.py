"""The loss on given distributions as one kernel: logits are read twice, distributions once, gradients written once.

Needs Triton, and so is imported at its first use only. A program works on one row. The first time over the row it
finds the maximum and the sum of the exponentials, a block of the vocabulary at a time; the second time it sums
``q x`` and leaves the gradient where the logits were. Numbers may be stored in any floating type; arithmetic is fp32.

Letters: m rows of a chunk, S rollout steps, V vocabulary, K top tokens, B a block of the vocabulary.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program holds at once."""
WARPS = 8


def soft_target_terms(
    logit_mSV: Tensor,
    q_mV: Tensor,
    weight_mS: Tensor,
    top_mK: tuple[Tensor, Tensor] | None,
    top_weight: float,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :class:`~eaglelab.objectives.soft_targets.Implementation`; K ids of a row differ from each other."""
    x_mSV, q_mV = logit_mSV.contiguous(), q_mV.contiguous()
    m, S, V = x_mSV.shape
    soft_mS = torch.empty(m, S, device=x_mSV.device, dtype=torch.float32)
    top_mS = torch.zeros_like(soft_mS)
    top_q_mK, top_id_mK = (q_mV, q_mV) if top_mK is None else (x_mK.contiguous() for x_mK in top_mK)
    if m * S:
        with torch.cuda.device_of(x_mSV):
            terms_kernel[(m * S,)](
                x_mSV,
                q_mV,
                weight_mS.contiguous(),
                top_q_mK,
                top_id_mK,
                soft_mS,
                top_mS,
                float(top_weight),
                S,
                V,
                top_id_mK.shape[-1],
                GRADIENT=gradient,
                BLOCK=min(BLOCK, triton.next_power_of_2(V)),
                BLOCK_K=0 if top_mK is None else triton.next_power_of_2(top_id_mK.shape[-1]),
                num_warps=WARPS,
            )
    if gradient:
        torch.autograd.graph.increment_version(x_mSV)  # autograd cannot see who writes
    return soft_mS, top_mS, x_mSV if gradient else None


def multiply_(x: Tensor, factor: Tensor) -> Tensor:
    """``x.mul_(factor)`` for a contiguous x and a scalar tensor; where that is 1, the usual case, x is not touched."""
    if x.numel():
        with torch.cuda.device_of(x):
            multiply_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, factor, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return x


@triton.jit(do_not_specialize=["S", "K"])
def terms_kernel(
    x_ptr,
    q_ptr,
    weight_ptr,
    top_q_ptr,
    top_id_ptr,
    soft_ptr,
    top_ptr,
    top_weight,
    S,
    V,
    K,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One of m * S rows; BLOCK_K: K and more, 0 without the top-K term, which is for S = 1 only."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * V
    q_ptr += row // S * V
    lane_B = tl.arange(0, BLOCK)

    highest = tl.load(x_ptr).to(tl.float32)
    mass_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at_B = start + lane_B
        x_B = tl.load(x_ptr + at_B, mask=at_B < V, other=float("-inf")).to(tl.float32)
        before = highest
        highest = tl.maximum(before, tl.max(x_B, 0))
        mass_B = mass_B * tl.exp(before - highest) + tl.exp(x_B - highest)
    mass = tl.sum(mass_B, 0)

    weight = tl.load(weight_ptr + row).to(tl.float32)
    scale = weight
    if BLOCK_K > 0:
        lane_K = tl.arange(0, BLOCK_K)
        inside_K = lane_K < K
        top_q_K = tl.load(top_q_ptr + row * K + lane_K, mask=inside_K, other=0.0).to(tl.float32)
        top_id_K = tl.load(top_id_ptr + row * K + lane_K, mask=inside_K, other=0)
        top_x_K = tl.load(x_ptr + top_id_K, mask=inside_K, other=0.0).to(tl.float32) - highest
        top_mass = tl.sum(top_q_K, 0)
        tl.store(top_ptr + row, tl.log(mass) * top_mass - tl.sum(top_q_K * top_x_K, 0))
        scale += top_weight * top_mass
    tl.debug_barrier()  # other threads of the program write over what was read above

    taught_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at_B = start + lane_B
        x_B = tl.load(x_ptr + at_B, mask=at_B < V, other=0.0).to(tl.float32) - highest
        q_B = tl.load(q_ptr + at_B, mask=at_B < V, other=0.0).to(tl.float32)
        taught_B += q_B * x_B
        if GRADIENT:
            tl.store(x_ptr + at_B, scale / mass * tl.exp(x_B) - weight * q_B, mask=at_B < V)
    tl.store(soft_ptr + row, tl.log(mass) - tl.sum(taught_B, 0))

    if GRADIENT and BLOCK_K > 0:
        tl.debug_barrier()  # these entries were written by other threads
        q_K = tl.load(q_ptr + top_id_K, mask=inside_K, other=0.0).to(tl.float32)
        grad_K = scale / mass * tl.exp(top_x_K) - weight * q_K - top_weight * top_q_K
        tl.store(x_ptr + top_id_K, grad_K, mask=inside_K)


@triton.jit
def multiply_kernel(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        at_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x_B = tl.load(x_ptr + at_B, mask=at_B < count, other=0.0).to(tl.float32)
        tl.store(x_ptr + at_B, x_B * factor, mask=at_B < count)
