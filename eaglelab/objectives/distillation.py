"""Soft-target cross entropy through a token head, without ever holding the logits of a batch.

Teacher and drafter logits of a chunk of rows exist only while that chunk is worked on; its gradient to the
predicted states is taken on the spot, so that nothing of size [rows, V] outlives its chunk.

Letters: M supervised rows, d hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Head = Callable[[Tensor], Tensor]


class Distillation(NamedTuple):
    """Sums over rows: ``soft`` is differentiable, the rest are measurements.

    Attributes:
        soft: scalar fp32, sum of ``-sum_v q(v) log p(v)``.
        hits_M: bool, drafter and teacher agree on the most probable token.
        recall: scalar, rows whose teacher argmax is among the drafter's ``recall_k`` most probable tokens.
    """

    soft: Tensor
    hits_M: Tensor
    recall: Tensor


def soft_cross_entropy(
    predicted_Md: Tensor,
    teacher_Md: Tensor,
    head: Head,
    *,
    chunk: int = 1024,
    recall_k: int = 5,
) -> Distillation:
    """Cross entropy of the drafter's distribution against the frozen head's on the teacher's feature.

    Both distributions come from ``head``, softmax and sums in fp32 (EAGLE-1's and HASS's ``p_w`` term; the full
    vocabulary, not renormalised).

    Args:
        predicted_Md: predicted features, the only differentiable input.
        teacher_Md: target features of the same rows.
        head: [m, d] -> [m, V] logits; frozen.
        chunk: rows per piece; memory is about 3 * chunk * V * 4 bytes.
        recall_k: how many draft tokens count for ``recall``.
    """
    soft, hits_M, recall = _SoftCrossEntropy.apply(predicted_Md, teacher_Md, head, chunk, recall_k)
    return Distillation(soft, hits_M, recall)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, teacher: Tensor, head: Head, chunk: int, recall_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_grad = ctx.needs_input_grad[0]
        soft = torch.zeros((), device=predicted.device)
        recall = torch.zeros((), device=predicted.device)
        grad = torch.empty_like(predicted) if wants_grad else None
        hits = torch.empty(predicted.shape[0], dtype=torch.bool, device=predicted.device)
        for start in range(0, predicted.shape[0], chunk):
            piece = slice(start, start + chunk)
            q_mV = head(teacher[piece]).float().softmax(-1)
            with torch.set_grad_enabled(wants_grad):
                state = predicted[piece].detach().requires_grad_(wants_grad)
                log_p_mV = head(state).float().log_softmax(-1)
                loss = -(q_mV * log_p_mV).sum()
            if grad is not None:
                (grad[piece],) = torch.autograd.grad(loss, state)
            soft += loss.detach()
            best_m = q_mV.argmax(-1)
            hits[piece] = log_p_mV.argmax(-1) == best_m
            top_mk = log_p_mV.topk(min(recall_k, log_p_mV.shape[-1]), dim=-1).indices
            recall += (top_mk == best_m[:, None]).any(-1).sum()
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(hits, recall)
        return soft, hits, recall

    @staticmethod
    def backward(ctx: Any, grad_soft: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad_soft * grad, None, None, None, None
