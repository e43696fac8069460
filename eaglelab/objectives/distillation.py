"""Soft-target distillation through the frozen token head (EAGLE-1, HASS).

Letters: M supervised rows, d hidden width, V vocabulary, K top tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eaglelab.objectives.chunked import chunk_rows, chunked_sum
from eaglelab.objectives.soft_targets import as_taken, soft_cross_entropy
from eaglelab.ops import largest

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


@dataclasses.dataclass
class Taught:
    """What a teacher's distribution says about the K most probable tokens of each row; other passes may land there.

    Attributes:
        best_M: int64, the most probable token.
        q_MK, id_MK: probabilities, not renormalised, and ids of the K most probable ones.
    """

    best_M: Tensor
    q_MK: Tensor
    id_MK: Tensor

    def of(self, row_m: Tensor | slice) -> Taught:
        """Those of some rows."""
        return Taught(self.best_M[row_m], self.q_MK[row_m], self.id_MK[row_m])

    @classmethod
    def from_distribution(cls, q_mV: Tensor, top_k: int) -> Taught:
        return cls(largest(q_mV)[1], *q_mV.topk(min(top_k, q_mV.shape[-1]), dim=-1))

    @classmethod
    def joined(cls, pieces: Sequence[Taught]) -> Taught:
        """The rows of all pieces, in order."""
        return cls(*(torch.cat([getattr(one, field.name) for one in pieces]) for field in dataclasses.fields(cls)))


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
    taught: Taught | None = None,
    remember: list[Taught] | None = None,
    chunk: int | None = None,
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
        taught: of these rows and this ``top_k``, where another pass found it before; None: it is looked up.
        remember: gets what was looked up.
        chunk: rows per piece; memory is about 2 * chunk * V * 4 bytes. None: :func:`chunk_rows`.
    """
    device = predicted_Md.device
    hits_M = torch.empty(predicted_Md.shape[0], dtype=torch.bool, device=device)
    soft, top, recall = (torch.zeros((), device=device) for _ in range(3))
    found: list[Taught] = []

    def loss_of(predicted_md: Tensor, piece: slice) -> Tensor:
        top_mK = None
        with torch.no_grad():
            q_mV = head(teacher_Md[piece]).softmax(-1, dtype=torch.float32)
            if top_weight:
                one = Taught.from_distribution(q_mV, top_k) if taught is None else taught.of(piece)
                found.append(one)
                best_m, q_mK = one.best_M, one.q_MK
                top_mK = (q_mK / q_mK.sum(-1, keepdim=True) if renormalise else q_mK), one.id_MK
            else:
                best_m = largest(q_mV)[1]
            if label_M is not None:
                q_mV.zero_().scatter_(-1, label_M[piece, None], 1.0)
        logit_mV = as_taken(head(predicted_md), q_mV.dtype)
        with torch.no_grad():
            hits_M[piece] = largest(logit_mV)[1] == best_m
            drafted_mk = logit_mV.topk(min(recall_k, logit_mV.shape[-1]), dim=-1).indices
            recall.add_((drafted_mk == best_m[:, None]).any(-1).sum())
        weight_m1 = q_mV.new_full((len(q_mV), 1), soft_weight)
        loss, soft_m1, top_m1 = soft_cross_entropy(logit_mV[:, None], q_mV, weight_m1, top_mK, top_weight)
        soft.add_(soft_m1.sum())
        top.add_(top_m1.sum())
        return loss

    loss = chunked_sum(loss_of, predicted_Md, chunk=chunk or head_chunk(head, teacher_Md))
    if remember is not None and found:
        remember.append(Taught.joined(found))
    return Distillation(loss, soft, top, hits_M, recall)


def head_chunk(head: Head, teacher_Mw: Tensor, steps: int = 1) -> int:
    """Rows per piece for a head that reads such rows."""
    with torch.no_grad():
        return chunk_rows(head(teacher_Mw[:1]).shape[-1], steps)
