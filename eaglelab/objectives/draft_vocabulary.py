"""EAGLE-3's objective: soft cross entropy on the draft vocabulary, of all steps of a rollout at once.

Steps that land on the same row are taught the same distribution, so the target's head reads each row once, not once per
step, and the trained head has one gradient to accumulate.

Letters: M supervised rows, S rollout steps, d hidden width, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from eaglelab.objectives.chunked import chunked_sum
from eaglelab.objectives.distillation import Head, head_chunk
from eaglelab.objectives.soft_targets import as_taken, soft_cross_entropy
from eaglelab.ops import largest


@dataclasses.dataclass
class DraftDistillation:
    """``loss`` is differentiable; the rest are measurements: sums over the counted rows of each step, [S].

    Attributes:
        loss: weighted sum of ``soft_S``, a scalar in fp32.
        soft_S: sum of ``-sum_k q(k) log p(k)``.
        counted_S: rows whose target argmax, over the whole vocabulary, is in the draft vocabulary.
        hits_S: counted rows whose most probable draft token is that argmax.
        recall_S: counted rows that have it among their ``recall_k`` most probable.
    """

    loss: Tensor
    soft_S: Tensor
    counted_S: Tensor
    hits_S: Tensor
    recall_S: Tensor


@dataclasses.dataclass(frozen=True)
class TeacherHeads:
    """What reads the target's distributions off teacher rows [..., w]; frozen.

    Attributes:
        whole: logits [..., V].
        drafted: logits of the draft vocabulary alone [..., K]; None: that is the target's own.
        ids_K: ascending target ids of the draft vocabulary.
    """

    whole: Head
    drafted: Head | None = None
    ids_K: Tensor | None = None


def distill_to_draft_vocabulary(
    state_MSd: Tensor,
    lands_MS: Tensor,
    teacher_Mw: Tensor,
    draft_head: Head,
    teacher: TeacherHeads,
    weigh: Callable[[Tensor], Tensor],
    *,
    parameters: Iterable[Tensor] = (),
    recall_k: int = 5,
    chunk: int | None = None,
) -> DraftDistillation:
    """Cross entropy against the target's distribution, restricted to the draft vocabulary and renormalised there.

    Args:
        state_MSd: for each row the drafter's state after each step that lands there, differentiable.
        lands_MS: bool, whether there is one.
        teacher_Mw: what ``teacher`` reads for the rows.
        draft_head: [m, S, d] -> [m, S, K].
        teacher: the target's heads.
        weigh: (counted rows of each step [S]) -> weight of each step's sum [S].
        parameters: trained tensors that ``draft_head`` reads.
        recall_k: as in :func:`~eaglelab.objectives.distill`.
        chunk: rows per piece; None: :func:`~eaglelab.objectives.chunked.chunk_rows`.
    """
    S = lands_MS.shape[1]
    chunk = chunk or head_chunk(teacher.drafted or teacher.whole, teacher_Mw, S)
    counted_MS = lands_MS & _in_vocabulary(teacher_Mw, teacher)[:, None]
    counted_S = counted_MS.sum(0)
    weight_S = weigh(counted_S)
    soft_S, hits_S, recall_S = (weight_S.new_zeros(S) for _ in range(3))

    def loss_of(state_mSd: Tensor, piece: slice) -> Tensor:
        counted_mS = counted_MS[piece]
        with torch.no_grad():
            q_mK = (teacher.drafted or teacher.whole)(teacher_Mw[piece]).softmax(-1, dtype=torch.float32)
            best_m = largest(q_mK)[1]
        logit_mSK = as_taken(draft_head(state_mSd), q_mK.dtype)
        with torch.no_grad():
            hits_S.add_((counted_mS & (largest(logit_mSK)[1] == best_m[:, None])).sum(0))
            drafted_mSk = logit_mSK.topk(min(recall_k, logit_mSK.shape[-1]), dim=-1).indices
            recall_S.add_((counted_mS & (drafted_mSk == best_m[:, None, None]).any(-1)).sum(0))
        loss, soft_mS, _ = soft_cross_entropy(logit_mSK, q_mK, counted_mS * weight_S)
        soft_S.add_((counted_mS * soft_mS).sum(0))
        return loss

    loss = chunked_sum(loss_of, state_MSd, parameters, chunk=chunk)
    return DraftDistillation(loss, soft_S, counted_S, hits_S, recall_S)


@torch.no_grad()
def _in_vocabulary(teacher_Mw: Tensor, teacher: TeacherHeads) -> Tensor:
    """bool [M]: the target's most probable token can be drafted."""
    if teacher.ids_K is None:
        return torch.ones(len(teacher_Mw), dtype=torch.bool, device=teacher_Mw.device)
    chunk = head_chunk(teacher.whole, teacher_Mw)
    best_M = torch.cat([largest(teacher.whole(teacher_mw))[1] for teacher_mw in teacher_Mw.split(chunk)])
    return torch.isin(best_M, teacher.ids_K)
