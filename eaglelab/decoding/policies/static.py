"""Fixed shapes filled with the drafter's most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eaglelab.decoding.policies.fixed import STATIC_25, FixedTree, read_paths
from eaglelab.decoding.protocol import Drafter, DraftSeed, DraftState
from eaglelab.decoding.tree import Tree


class StaticTree(FixedTree):
    """The same tree in every round, given as paths of child ranks; rank 0 is the most likely child.

    Source: contracts, section 6; the default is the 25-node tree of EAGLE-1.

    Raises:
        ValueError: paths that are not a tree (see `parents_of_paths`) or an empty list.
    """

    name = "static"

    def __init__(self, paths: Sequence[Sequence[int]] = STATIC_25) -> None:
        super().__init__(paths)

    @classmethod
    def from_file(cls, path: str | Path) -> StaticTree:
        """From a JSON list of paths; errors are those of `read_paths` and of the class."""
        return cls(read_paths(path))

    def draft(self, drafter: Drafter, state: DraftState, seed: DraftSeed) -> Tree:
        """The most likely children of every node; errors are those of `fill`."""
        return self.fill(drafter, state, seed, _most_likely)


MOST = 1000


class Chain(StaticTree):
    """The drafter's most likely continuation, `depth` tokens long.

    Raises:
        ValueError: depth < 1.
    """

    name = "chain"

    def __init__(self, depth: int = 5) -> None:
        if type(depth) is not int or depth < 1:
            raise ValueError(
                f"tree.depth={depth!r}: a chain needs a whole number of draft tokens >= 1; use "
                "tree=none to decode without a drafter"
            )
        if depth > MOST:
            raise ValueError(f"tree.depth={depth}: at most {MOST:,} draft tokens; a round verifies all of them")
        super().__init__([(0,) * level for level in range(1, depth + 1)])

    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "nodes": self.max_nodes, "depth": self.max_depth}


def _most_likely(log_p_BWV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    best = log_p_BWV.topk(top_k, dim=-1)
    return best.values, best.indices
