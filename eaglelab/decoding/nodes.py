"""The trees of a round, kept for telemetry; tensors become lists only when somebody reads them, after the round.

Letters: B batch (or 1 where all sequences share it), R flat rows, M candidates of a grown tree, N nodes kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eaglelab.decoding.policies.dynamic import best_first
from eaglelab.decoding.tree import Candidates, FlatTree

if TYPE_CHECKING:
    from eaglelab.target.experts import ExpertUnion

DROPPED = 32
"""Most candidates recorded of those that a tree looked at and did not keep, the best ones."""


class RoundTrees:
    """What a round drafted for all its sequences: row 0 is the root, row i + 1 node i.

    Holds the round's small tensors (no scores, no masks).
    """

    def __init__(self, flat: FlatTree, batch: int) -> None:
        self.batch = batch
        self._parent_BR, self._depth_BR = flat.topology.parent_BR, flat.topology.depth_BR
        self._tokens_BR, self._log_values_BR = flat.tokens_BR, flat.log_values_BR
        self._candidates = flat.candidates

    @cached_property
    def tokens(self) -> list[list[int]]:
        return self._lists(self._tokens_BR)

    @cached_property
    def parents(self) -> list[list[int]]:
        return self._lists(self._parent_BR)

    @cached_property
    def depths(self) -> list[list[int]]:
        return self._lists(self._depth_BR)

    @cached_property
    def confidences(self) -> list[list[float]]:
        values_BR = torch.zeros_like(self._tokens_BR) if self._log_values_BR is None else self._log_values_BR
        return self._lists(values_BR.exp())

    @cached_property
    def forwarded(self) -> list[list[bool]]:
        """Whether the drafter was run on each row: a fixed tree's nodes with children, a grown tree's frontiers."""
        if self._candidates is None:
            parents, rows = self.parents, self._tokens_BR.shape[1]
            return [[row in set(line[1:]) for row in range(rows)] for line in parents]
        kept_BR = torch.nn.functional.pad(self._candidates.kept_BN + 1, (1, 0))
        grown_BR = torch.zeros_like(torch.nn.functional.pad(self._candidates.parent_BM, (1, 0)), dtype=torch.bool)
        return grown_BR.scatter(1, self._candidates.parent_BM, True).gather(1, kept_BR).tolist()

    @cached_property
    def dropped(self) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
        """Tokens, parents' rows and confidences of the best dropped candidates, best first. Their rows follow the
        tree's, in this order; a parent is a row of either."""
        if self._candidates is None:
            nothing: list[list[Any]] = [[] for _ in range(self.batch)]
            return nothing, nothing, nothing
        dropped_BD = _best_dropped(self._candidates, DROPPED)
        kept_BN, parent_BM = self._candidates.kept_BN, self._candidates.parent_BM
        order_BX = torch.cat([kept_BN, dropped_BD], dim=1)
        row_BX = torch.arange(1, order_BX.shape[1] + 1, device=order_BX.device).expand_as(order_BX)
        row_BR = torch.zeros_like(torch.nn.functional.pad(parent_BM, (1, 0))).scatter(1, order_BX + 1, row_BX)
        return (
            self._candidates.tokens_BM.gather(1, dropped_BD).tolist(),
            row_BR.gather(1, parent_BM.gather(1, dropped_BD)).tolist(),
            self._candidates.value_BM.gather(1, dropped_BD).exp().tolist(),
        )

    def _lists(self, values_BR: Tensor) -> list[list[Any]]:
        return values_BR.expand(self.batch, -1).tolist()


@dataclass(frozen=True, eq=False)
class NodeRecord:
    """The drafted nodes of one sequence in one round, in row order; recorded on request.

    experts_union, experts_root: for a mixture-of-experts target, distinct experts per layer that all verified rows
        touched, and that the root's row alone touched, as a plain step would; None for dense targets.
    """

    trees: RoundTrees
    sequence: int
    drafts: bool
    accepted_rows: Sequence[int]
    experts_union: list[int] | None = None
    experts_root: list[int] | None = None

    @property
    def root_token(self) -> int:
        return self.trees.tokens[self.sequence][0]

    @property
    def token(self) -> list[int]:
        return self._nodes(self.trees.tokens)

    @property
    def parent(self) -> list[int]:
        """Row of each node's parent: 0 is the root, i + 1 is node i."""
        return self._nodes(self.trees.parents)

    @property
    def depth(self) -> list[int]:
        """Level of each node, the root's children at 1."""
        return self._nodes(self.trees.depths)

    @property
    def confidence(self) -> list[float]:
        """The drafter's probability of each node's whole path, at temperature 1."""
        return self._nodes(self.trees.confidences)

    @property
    def forwarded(self) -> list[bool]:
        """Whether the drafter was run on each node, to propose children."""
        return self._nodes(self.trees.forwarded)

    @property
    def accepted(self) -> list[bool]:
        """Whether each node is on the accepted path."""
        rows = set(self.accepted_rows)
        return [row in rows for row in range(1, len(self.token) + 1)]

    @property
    def dropped(self) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents' rows and confidences of candidates that the tree did not keep; see `RoundTrees.dropped`."""
        if not self.drafts:
            return [], [], []
        tokens, parents, confidences = self.trees.dropped
        return tokens[self.sequence], parents[self.sequence], confidences[self.sequence]

    def to_dict(self) -> dict[str, Any]:
        """The fields that a telemetry record gets; see `eaglelab.evaluation.telemetry`."""
        dropped_token, dropped_parent, dropped_confidence = self.dropped
        return {
            "depth": self.depth,
            "confidence": self.confidence,
            "node_accepted": self.accepted,
            "experts_union": self.experts_union,
            "experts_root": self.experts_root,
            "root_token": self.root_token,
            "node_token": self.token,
            "node_parent": self.parent,
            "node_forwarded": self.forwarded,
            "dropped_token": dropped_token,
            "dropped_parent": dropped_parent,
            "dropped_confidence": dropped_confidence,
        }

    def _nodes(self, rows: list[list[Any]]) -> list[Any]:
        return rows[self.sequence][1:] if self.drafts else []


def node_records(
    flat: FlatTree, drafting: Sequence[bool], accepted_rows: Sequence[Sequence[int]], experts: ExpertUnion | None
) -> list[NodeRecord]:
    """One record per sequence; those that do not draft have no nodes."""
    nothing: list[list[int] | None] = [None] * len(drafting)
    unions, roots = (nothing, nothing) if experts is None else experts.to_host()
    trees = RoundTrees(flat, len(drafting))
    return [
        NodeRecord(trees, b, drafts and flat.nodes > 0, accepted_rows[b], unions[b], roots[b])
        for b, drafts in enumerate(drafting)
    ]


def _best_dropped(candidates: Candidates, most: int) -> Tensor:
    """Places [B, D] of the best candidates that were not kept, best first; a dropped parent is before its child."""
    kept_BM = torch.zeros_like(candidates.tokens_BM).scatter(1, candidates.kept_BN, 1)
    order_BM = best_first(candidates.value_BM)
    kept_last_BM = kept_BM.gather(1, order_BM).argsort(dim=1, stable=True)
    dropped = kept_BM.shape[1] - candidates.kept_BN.shape[1]
    return order_BM.gather(1, kept_last_BM)[:, : min(most, dropped)]
