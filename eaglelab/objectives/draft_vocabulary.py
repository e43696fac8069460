"""EAGLE-3's objective: soft cross entropy on the draft vocabulary.

Letters: M supervised rows, d hidden width, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from eaglelab.objectives.chunked import chunked_sum
from eaglelab.objectives.distillation import Head


@dataclasses.dataclass
class DraftDistillation:
    """Sums over counted rows; ``loss`` is differentiable, the rest are measurements.

    Attributes:
        loss: sum of ``-sum_k q(k) log p(k)``, fp32.
        counted: rows whose target argmax, over the whole vocabulary, is in the draft vocabulary.
        hits: counted rows whose most probable draft token is that argmax.
        recall: counted rows that have it among their ``recall_k`` most probable.
    """

    loss: Tensor
    counted: Tensor
    hits: Tensor
    recall: Tensor


def distill_to_draft_vocabulary(
    state_Md: Tensor,
    teacher_Md: Tensor,
    draft_head: Head,
    target_head: Head,
    ids_K: Tensor | None,
    *,
    parameters: Iterable[Tensor] = (),
    recall_k: int = 5,
    chunk: int = 1024,
) -> DraftDistillation:
    """Cross entropy against the target's distribution, restricted to the draft vocabulary and renormalised there.

    Args:
        state_Md: drafter states, differentiable.
        teacher_Md: what ``target_head`` reads for the same rows.
        draft_head: [m, d] -> [m, K].
        target_head: [m, d] -> [m, V]; frozen.
        ids_K: ascending target ids of the draft vocabulary; None: all of them.
        parameters: trained tensors that ``draft_head`` reads.
        recall_k, chunk: as in :func:`~eaglelab.objectives.distill`.
    """
    device = state_Md.device
    counted, hits, recall = (torch.zeros((), device=device) for _ in range(3))

    def loss_of(state_md: Tensor, piece: slice) -> Tensor:
        with torch.no_grad():
            target_mV = target_head(teacher_Md[piece])
            best_m1 = target_mV.argmax(-1, keepdim=True)
            if ids_K is not None:
                target_mV = target_mV[:, ids_K]
            best_draft_m1 = target_mV.argmax(-1, keepdim=True)
            in_vocabulary_m1 = (best_draft_m1 if ids_K is None else ids_K[best_draft_m1]) == best_m1
            q_mK = target_mV.float().softmax(-1).mul_(in_vocabulary_m1)
            del target_mV
        log_p_mK = draft_head(state_md).float().log_softmax(-1)
        with torch.no_grad():
            counted.add_(in_vocabulary_m1.sum())
            hits.add_(((log_p_mK.argmax(-1, keepdim=True) == best_draft_m1) & in_vocabulary_m1).sum())
            drafted_mk = log_p_mK.topk(min(recall_k, log_p_mK.shape[-1]), dim=-1).indices
            recall.add_(((drafted_mk == best_draft_m1) & in_vocabulary_m1).sum())
        return -(q_mK * log_p_mK).sum()

    loss = chunked_sum(loss_of, state_Md, parameters, chunk=chunk)
    return DraftDistillation(loss, counted, hits, recall)
