"""A drafter whose distributions are a function of the path, for batches, and which checks what it is given.

A path is one whole number: a sequence starts at its own number, and a child's is `parent * BASE + token + 1`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

BASE = 16  # tokens are below BASE - 1


def child(path, token):
    return path * BASE + token + 1


@dataclass
class TableState:
    path_BP: torch.Tensor  # provisional rows


class TableDrafter:
    """Its hidden state is the path's number.

    Args:
        log_p: int64 paths [...] -> log-probabilities [..., Vd].
        target_ids: draft id -> target id; None: the same.
    """

    taps = ("final",)
    max_positions = 10**6

    def __init__(self, log_p: Callable[[torch.Tensor], torch.Tensor], target_ids: torch.Tensor | None = None):
        self.log_p, self.target_ids = log_p, target_ids
        self.steps = 0

    def new_state(self, batch: int, capacity: int, room: int | None = None) -> TableState:
        return TableState(torch.empty(batch, 0, dtype=torch.int64))

    @staticmethod
    def seed(starts, *, at: int = 4, **random):
        """Sequences at the paths `starts`, each below BASE and above 0, all at draft position `at`."""
        from eaglelab.decoding import DraftSeed

        hidden_B1d = torch.as_tensor(starts, dtype=torch.float64)[:, None, None]
        return DraftSeed(hidden_B1d, torch.full((len(starts), 1), at), **random)

    def step(self, state, hidden_BWd, tokens_BW, position_BW, ancestor_BWP=None, *, at: int = 4):
        B, W = tokens_BW.shape
        parent_BW = hidden_BWd[..., 0].long()
        path_BW = child(parent_BW, tokens_BW)
        state.path_BP = torch.cat([state.path_BP, path_BW], dim=1)
        P = state.path_BP.shape[1]
        if ancestor_BWP is None:
            assert W == 1
            ancestor_BWP = torch.ones(B, 1, P, dtype=torch.bool)
        assert ancestor_BWP.shape == (B, W, P) and ancestor_BWP.dtype == torch.bool
        assert (position_BW == position_BW[:1, :1]).all(), "one level per step"
        level = int(position_BW[0, 0]) - at
        assert level == self.steps + 1
        sees_BWP = torch.where(ancestor_BWP, state.path_BP[:, None], 0).sort(dim=-1, descending=True).values
        lineage_BWL = torch.stack([path_BW // BASE**up for up in range(level)], dim=-1)
        assert torch.equal(sees_BWP[..., :level], lineage_BWL) and (sees_BWP[..., level:] == 0).all()
        assert (path_BW // BASE**level < BASE).all() and (path_BW // BASE**level > 0).all()
        assert ancestor_BWP[..., -W:].diagonal(dim1=-2, dim2=-1).all()
        self.steps += 1
        return path_BW.double()[..., None]

    def log_probs(self, hidden):
        return self.log_p(hidden[..., 0].long())

    def to_target_ids(self, draft_ids):
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]


def tree_paths(tree) -> list[list[tuple[int, ...]]]:
    """Tokens from the root's child down to each node, per sequence, by walking the parents."""
    parents = tree.parents_BN.expand(len(tree.tokens_BN), -1).tolist()
    batch = []
    for tokens, rows in zip(tree.tokens_BN.tolist(), parents, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for token, row in zip(tokens, rows, strict=True):
            paths.append((*paths[row], token))
        batch.append(paths[1:])
    return batch
