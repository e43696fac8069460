"""Soft-target distillation through the frozen token head (EAGLE-1, HASS).

Letters: M supervised rows, d hidden width, V vocabulary, K top tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eaglelab.objectives.chunked import chunked_sum

Head = Callable[[Tensor], Tensor]


@dataclasses.dataclass
class Distillation:
    """Sums over rows; ``loss`` is differentiable, the rest are measurements.

    Attributes:
        loss: ``soft_weight * soft + top_weight * top``, fp32.
        soft: sum of ``-sum_v q(v) log p(v)``; with labels ``-log p(label)``.
        top: sum of the former over the teacher's K most probable tokens only; 0 without them.
        hits_M: bool, drafter and teacher agree on the most probable token.
        recall: rows whose teacher argmax is among the drafter's ``recall_k`` most probable tokens.
    """

    loss: Tensor
    soft: Tensor
    top: Tensor
    hits_M: Tensor
    recall: Tensor


def distill(
    predicted_Md: Tensor,
    teacher_Md: Tensor,
    head: Head,
    *,
    soft_weight: float = 1.0,
    top_weight: float = 0.0,
    top_k: int = 10,
    renormalise: bool = False,
    recall_k: int = 5,
    label_M: Tensor | None = None,
    chunk: int = 1024,
) -> Distillation:
    """Cross entropy of the drafter's distribution against the frozen head's on the teacher's feature.

    Both distributions come from ``head``; softmax and sums are fp32. The soft term is EAGLE-1's, over the full
    vocabulary. The top-K term is HASS's: it keeps the teacher's probabilities as they are, so that a row weighs as
    much as the mass of its K tokens.

    Args:
        predicted_Md: predicted features, the only differentiable input.
        teacher_Md: target features of the same rows.
        head: [m, d] -> [m, V] logits; frozen.
        soft_weight, top_weight: weights of the two terms; the top-K term is not computed at weight 0.
        top_k: K; at K = V the two terms are equal.
        renormalise: ablation: divide the K probabilities by their sum, which is another loss.
        recall_k: how many draft tokens count for ``recall``.
        label_M: int64, the data's tokens: ablation: their one-hot replaces the teacher's distribution in the soft
            term. The top-K term, hits and recall stay the teacher's.
        chunk: rows per piece; memory is about 3 * chunk * V * 4 bytes.
    """
    device = predicted_Md.device
    hits_M = torch.empty(predicted_Md.shape[0], dtype=torch.bool, device=device)
    soft, top, recall = (torch.zeros((), device=device) for _ in range(3))

    def loss_of(predicted_md: Tensor, piece: slice) -> Tensor:
        top_mK = None
        with torch.no_grad():
            q_mV = head(teacher_Md[piece]).float().softmax(-1)
            best_m = q_mV.argmax(-1)
            if top_weight:
                q_mK, id_mK = q_mV.topk(min(top_k, q_mV.shape[-1]), dim=-1)
                top_mK = (q_mK / q_mK.sum(-1, keepdim=True) if renormalise else q_mK), id_mK
            if label_M is not None:
                q_mV.zero_().scatter_(-1, label_M[piece, None], 1.0)
        log_p_mV = head(predicted_md).float().log_softmax(-1)
        with torch.no_grad():
            hits_M[piece] = log_p_mV.argmax(-1) == best_m
            drafted_mk = log_p_mV.topk(min(recall_k, log_p_mV.shape[-1]), dim=-1).indices
            recall.add_((drafted_mk == best_m[:, None]).any(-1).sum())
        soft_piece, top_piece = _CrossEntropies.apply(log_p_mV, q_mV, top_mK)
        soft.add_(soft_piece.detach())
        if top_mK is None:
            return soft_weight * soft_piece
        top.add_(top_piece.detach())
        return soft_weight * soft_piece + top_weight * top_piece

    loss = chunked_sum(loss_of, predicted_Md, chunk=chunk)
    return Distillation(loss, soft, top, hits_M, recall)


class _CrossEntropies(torch.autograd.Function):
    """Sums of ``-q log p`` over the vocabulary and over K given tokens.

    Their joint gradient is written over ``q_mV``, which nobody reads any more: beside ``log_p_mV`` there is never more
    than one further [m, V], with the second sum or without it.
    """

    @staticmethod
    def forward(
        ctx: Any, log_p_mV: Tensor, q_mV: Tensor, top_mK: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        ctx.q_mV, ctx.top_mK = q_mV, top_mK
        soft = -(q_mV * log_p_mV).sum()
        if top_mK is None:
            return soft, torch.zeros_like(soft)
        q_mK, id_mK = top_mK
        return soft, -(q_mK * log_p_mV.gather(-1, id_mK)).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_soft: Tensor, grad_top: Tensor) -> tuple[Tensor, None, None]:
        grad_mV = ctx.q_mV.mul_(-grad_soft)
        if ctx.top_mK is not None:
            q_mK, id_mK = ctx.top_mK
            grad_mV.scatter_add_(-1, id_mK, q_mK * -grad_top)
        ctx.q_mV = ctx.top_mK = None
        return grad_mV, None, None
