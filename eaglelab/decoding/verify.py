"""Verification: which drafted nodes the target confirms. Pure functions of tensors.

Letters: B batch, R flat rows (root first), V vocabulary, L rows of a path (deepest level + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglelab.decoding.tree import FlatTree


@dataclass(frozen=True)
class Decision:
    """What one verification decided, still on the device.

    accepted_B: accepted draft tokens.
    rows_BL: flat rows of the accepted path, the root's first; `accepted + 1` of them are real.
    published_BL: the accepted tokens, then the frontier token; `accepted + 1` of them are real.
        The frontier token was chosen by the target but is no verified row: its K/V and feature
        come with the next forward.
    """

    accepted_B: Tensor
    rows_BL: Tensor
    published_BL: Tensor

    def where(self, take_B1: Tensor, other: Decision) -> Decision:
        """This decision for the sequences in `take_B1` (bool), the other one for the rest."""
        return Decision(
            torch.where(take_B1[:, 0], self.accepted_B, other.accepted_B),
            torch.where(take_B1, self.rows_BL, other.rows_BL),
            torch.where(take_B1, self.published_BL, other.published_BL),
        )

    def to_host(self) -> HostDecision:
        """Bring the real entries to the host. The one host sync of a round.

        Raises:
            FloatingPointError: a token could not be chosen.
        """
        packed = torch.cat([self.accepted_B[:, None], self.rows_BL, self.published_BL], dim=1)
        L = self.rows_BL.shape[1]
        rows, published = [], []
        for accepted, *line in packed.tolist():
            rows.append(line[: accepted + 1])
            published.append(line[L : L + accepted + 1])
            check_chosen(published[-1])
        return HostDecision(rows, published)


@dataclass(frozen=True)
class HostDecision:
    """A `Decision` without its padding: per sequence `accepted + 1` rows and published tokens."""

    rows: list[list[int]]
    published: list[list[int]]


def check_chosen(tokens: Sequence[int]) -> None:
    """Raises FloatingPointError for a negative id: no token could be chosen."""
    if min(tokens) < 0:
        raise FloatingPointError(
            "the target's scores hold a NaN or leave no token possible, so no next token can be chosen; "
            "check its weights, its precision (dtype=float32) and the logits processors"
        )


def follow(chosen_BR: Tensor, flat: FlatTree) -> Decision:
    """Accept the longest path whose tokens are those that the target chose, then publish its choice at the end.

    Exact for every deterministic tree, whatever the target's rule. Greedy: the choice is the argmax. Sampling: the
    choice is one draw y from the row's processed distribution p; that y is child x has probability p(x), and that it
    is none of the children leaves p without them, renormalised, which is what trying the children one after the
    other with draft mass 1 gives. Source: contracts, section 6.

    Args:
        chosen_BR: the token that the target chooses after each row.
        flat: the tree. Siblings carry different tokens, hence the accepted rows form one path; a negative token is
            never accepted.
    """
    tree = flat.topology
    B, R = chosen_BR.shape
    if R == 1:
        return Decision(chosen_BR.new_zeros(B), chosen_BR.new_zeros(B, 1), chosen_BR)
    parent_BR = tree.parent_BR.expand(B, -1)
    follows_BR = flat.tokens_BR == chosen_BR.gather(1, parent_BR)
    follows_BR[:, 0] = True
    accepted_BR = (follows_BR[:, None, :] | ~tree.ancestor_BRR).all(dim=-1)
    depth_BR = tree.depth_BR * accepted_BR
    accepted_B, deepest_B = depth_BR.max(dim=1)
    rows_BL = _path_to(deepest_B, tree.path_BRL)
    return Decision(accepted_B, rows_BL, chosen_BR.gather(1, rows_BL))


def _path_to(row_B: Tensor, path_BRL: Tensor) -> Tensor:
    L = path_BRL.shape[-1]
    path_BRL = path_BRL.expand(row_B.shape[0], -1, -1)
    return path_BRL.gather(1, row_B[:, None, None].expand(-1, 1, L)).squeeze(1)
