"""Sampling from probabilities, and the acceptance rule of trees whose nodes were sampled.

Letters: B batch, R flat rows (root first), V target vocabulary, L rows of a path (deepest level + 1), K most children
of a row. Everything here runs in float64 and without a host sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eaglelab.decoding.tree import FlatTree, Proposals
from eaglelab.decoding.verify import Decision

_STEPS = 2.0**52  # a distribution's resolution: times a number below 1, the total still rounds to less than itself


def draw_from(p: Tensor, u: Tensor) -> Tensor:
    """Draw by inverse cumulative probability: the first id whose running sum exceeds u times the total.

    The running sum is taken in whole steps of 2^-52 of the total. So it does not move at an id of probability 0, in
    whichever order a device adds, and no such id is ever drawn.

    Args:
        p: [..., V] probabilities, or weights of any positive total.
        u: [...] uniform numbers in [0, 1).

    Returns:
        int64 [...], ids. -1 where `p` has no mass or a NaN, so that it cannot pass for a token.
    """
    p = p.double()
    total = p.sum(dim=-1, keepdim=True)
    usable = (total > 0) & total.isfinite()
    cumulated = (p * (_STEPS / total)).long().cumsum(dim=-1)
    place = (u.double()[..., None] * cumulated[..., -1:]).long()
    ids = torch.searchsorted(cumulated, place, right=True)
    return torch.where(usable, ids, -1).squeeze(-1)


def accept_sampled(p_BRV: Tensor, flat: FlatTree, accept_BLK: Tensor, draw_BL: Tensor) -> Decision:
    """Verify children that were drawn without replacement: the published tokens follow the target's distribution.

    At a row with target distribution p and draft distribution q, the children x are tried in the order in which they
    were drawn. x is accepted with probability min(1, p(x) / q(x)). If it is rejected, p becomes max(p - q, 0) and q
    loses x, both renormalised, and the next child is tried. With no child left, the token is drawn from what p has
    become; at a row without children, from its own p. Children of draft probability 0 were not drawn, only filled in,
    and are passed over. Where max(p - q, 0) is all zero, as it can be by rounding alone, p stays as it is.

    Source: contracts, section 6, sampled trees.

    Args:
        p_BRV: the target's processed distribution after each row; one-hot for greedy sequences.
        flat: a tree with its `Proposals`, or the bare root.
        accept_BLK: uniform numbers in [0, 1), for each level and each child of the row on it.
        draw_BL: the same, for the token that is drawn; independent of `accept_BLK`.
    """
    B, L = p_BRV.shape[0], flat.topology.path_BRL.shape[-1]
    batch_B = torch.arange(B, device=p_BRV.device)
    row_B, accepted_B = torch.zeros_like(batch_B), torch.zeros_like(batch_B)
    alive_B = torch.ones_like(batch_B, dtype=torch.bool)  # all rows so far were accepted
    rows: list[Tensor] = []
    published: list[Tensor] = []
    for level in range(L):
        rows.append(row_B)
        left_BV, child_B = _normalise(p_BRV[batch_B, row_B].double()), torch.full_like(row_B, -1)
        if level < L - 1:
            assert flat.proposals is not None, "a tree without proposals was not sampled: use verify.follow"
            q_BV, children_BK = _proposed(flat.proposals, row_B, p_BRV.shape[-1])
            child_B, left_BV = _try_children(left_BV, q_BV, children_BK, flat.tokens_BR, accept_BLK[:, level])
        drawn_B = draw_from(left_BV, draw_BL[:, level])
        alive_B = alive_B & (child_B >= 0)
        row_B = torch.where(alive_B, child_B, row_B)
        accepted_B = accepted_B + alive_B
        published.append(torch.where(alive_B, _pick(flat.tokens_BR, row_B), drawn_B))
    return Decision(accepted_B, torch.stack(rows, dim=1), torch.stack(published, dim=1))


def _try_children(
    p_BV: Tensor, q_BV: Tensor, children_BK: Tensor, tokens_BR: Tensor, accept_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """The accepted child's flat row, -1 for none, and what is left of p after the rejected ones."""
    chosen_B = torch.full_like(children_BK[:, 0], -1)
    for k in range(children_BK.shape[1]):
        child_B = children_BK[:, k]
        token_B = _pick(tokens_BR, child_B.clamp(min=0))
        px_B, qx_B = _pick(p_BV, token_B), _pick(q_BV, token_B)
        tried_B = (child_B >= 0) & (chosen_B < 0) & (qx_B > 0)
        accepted_B = tried_B & _passes(px_B, qx_B, accept_BK[:, k])
        rejected_B1 = (tried_B & ~accepted_B)[:, None]
        chosen_B = torch.where(accepted_B, child_B, chosen_B)
        p_BV = torch.where(rejected_B1, _reduce(p_BV, q_BV), p_BV)
        q_BV = torch.where(rejected_B1, _without(q_BV, token_B), q_BV)
    return chosen_B, p_BV


def _passes(px_B: Tensor, qx_B: Tensor, u_B: Tensor) -> Tensor:
    """With probability min(1, p(x) / q(x)); never where p(x) is 0."""
    return u_B.double() * qx_B < px_B


def _reduce(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """max(p - q, 0), renormalised; p where nothing is left."""
    residual_BV = (p_BV - q_BV).clamp(min=0)
    return torch.where(residual_BV.sum(-1, keepdim=True) > 0, _normalise(residual_BV), p_BV)


def _without(q_BV: Tensor, token_B: Tensor) -> Tensor:
    """q without one token, renormalised; all zero where that was the last."""
    return _normalise(q_BV.scatter(1, token_B[:, None], 0.0))


def _normalise(weights_BV: Tensor) -> Tensor:
    """To a sum of 1; weights that are all zero stay so."""
    total_B1 = weights_BV.sum(-1, keepdim=True)
    return weights_BV / torch.where(total_B1 == 0, 1.0, total_B1)


def _proposed(proposals: Proposals, row_B: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """q [B, V] over the target's vocabulary, and the children [B, K] of each row, -1 where it has none."""
    slot_B = proposals.slot_R[row_B]
    place_B = slot_B.clamp(min=0)
    batch_B = torch.arange(row_B.shape[0], device=row_B.device)
    draft_BV = proposals.q_BEV[batch_B, place_B].double()
    q_BV = draft_BV.new_zeros(row_B.shape[0], vocabulary)
    q_BV = q_BV.index_copy(1, proposals.target_ids_V, draft_BV)
    return q_BV, proposals.children_EK[place_B].masked_fill((slot_B < 0)[:, None], -1)


def _pick(values_BN: Tensor, index_B: Tensor) -> Tensor:
    return values_BN.gather(1, index_B[:, None]).squeeze(1)
