"""Trees whose shape is known beforehand: planned once, then drafted level by level.

Letters: B batch, N nodes, C nodes of one level, W nodes of one level that have children, P provisional draft rows so
far, K children looked at per node, V draft vocabulary, d hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglelab.decoding.protocol import Drafter, DraftSeed, DraftState
from eaglelab.decoding.tree import Topology, Tree, parents_of_paths

Ranks = tuple[int, ...]  # child ranks from the root down

# The pinned EAGLE-1 tree `mc_sim_7b_63` (docs: contracts, static tree), as ranks of children.
STATIC_25: tuple[Ranks, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)

Choose = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(log p [B, W, V] at temperature 1, K) -> log p and draft ids of each row's K children, [B, W, K], in rank order."""


@dataclass(frozen=True)
class Level:
    """How one level is drawn from the level above; None means "all, in order".

    top_k: children looked at per parent.
    pick_C: which of the flattened [W * top_k] children are nodes of this level.
    inner_W: which of the C nodes have children themselves, that is: are forwarded.
    hidden_W: for each of those, its parent's place in the previous level's W outputs.
    sees_1WP: which provisional rows each of them sees, itself among the last W; None: all.
    """

    top_k: int
    pick_C: Tensor | None
    forwards: int  # W; 0 at the last level
    inner_W: Tensor | None = None
    hidden_W: Tensor | None = None
    sees_1WP: Tensor | None = None

    def to(self, device: torch.device) -> Level:
        pick_C, *rest = (
            t if t is None else t.to(device) for t in (self.pick_C, self.inner_W, self.hidden_W, self.sees_1WP)
        )
        return Level(self.top_k, pick_C, self.forwards, *rest)


class FixedTree:
    """The same shape in every round; which tokens fill it is the subclass's choice.

    Attributes:
        paths: the nodes as child ranks, parents first, siblings in rank order.

    Raises:
        ValueError: paths that are not a tree (see `parents_of_paths`) or an empty list.
    """

    name: str
    samples = False
    asks_host = False

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        if not ordered:
            raise ValueError(f"{self.name} tree: no paths; use tree=none to decode without a drafter")
        parents = parents_of_paths(ordered)
        self.paths = ordered
        self.max_depth = len(ordered[-1])
        self.max_nodes = len(ordered)
        chain = self.max_nodes == self.max_depth
        self.levels = _plan_levels(ordered)
        self.max_step_rows = sum(level.forwards for level in self.levels)
        self.topology = Topology.from_parents(torch.tensor([parents]), self.max_depth, chain=chain)
        self._device = torch.device("cpu")

    def settings(self) -> dict[str, Any]:
        is_default = tuple(self.paths) == STATIC_25
        return {
            "name": self.name,
            "nodes": self.max_nodes,
            "depth": self.max_depth,
            "paths": "eagle1_25" if is_default else [list(path) for path in self.paths],
        }

    def fill(self, drafter: Drafter, state: DraftState, seed: DraftSeed, choose: Choose) -> Tree:
        """Draft level by level: one drafter call per level that has children.

        Raises:
            ValueError: a node has more children than the draft vocabulary has tokens.
        """
        self.move_to(seed.hidden_B1d.device)
        hidden_BWd = seed.hidden_B1d
        value_BW1: Tensor | None = None
        tokens, values = [], []
        for depth, level in enumerate(self.levels, start=1):
            log_p_BWV = drafter.log_probs(hidden_BWd)
            self._check_vocabulary(level.top_k, log_p_BWV.shape[-1])
            log_p_BWK, ids_BWK = choose(log_p_BWV, level.top_k)
            value_BWK = log_p_BWK if value_BW1 is None else value_BW1 + log_p_BWK
            tokens_BC = _take(drafter.to_target_ids(ids_BWK).flatten(1), level.pick_C)
            value_BC = _take(value_BWK.flatten(1), level.pick_C)
            tokens.append(tokens_BC)
            values.append(value_BC)
            if not level.forwards:
                break
            value_BW1 = _take(value_BC, level.inner_W).unsqueeze(-1)
            tokens_BW, sees_1WP = _take(tokens_BC, level.inner_W), level.sees_1WP
            hidden_BWd = drafter.step(
                state,
                _take(hidden_BWd, level.hidden_W),
                tokens_BW,
                (seed.position_B1 + depth).expand_as(tokens_BW),
                None if sees_1WP is None else sees_1WP.expand(seed.batch, -1, -1),
            )
        return Tree(torch.cat(tokens, dim=1), torch.cat(values, dim=1), self.topology, expanded=self.max_nodes)

    def move_to(self, device: torch.device) -> None:
        """Bring the plan to the drafter's device, once."""
        if device != self._device:
            self.levels = [level.to(device) for level in self.levels]
            self.topology = self.topology.to(device)
            self._device = device

    def _check_vocabulary(self, top_k: int, vocabulary: int) -> None:
        if top_k > vocabulary:
            raise ValueError(
                f"tree={self.name} takes {top_k} children of one node, but the draft vocabulary "
                f"has {vocabulary} tokens; use tree=chain or a tree.paths file with ranks below "
                f"{vocabulary}"
            )


def read_paths(path: str | Path) -> list[list[int]]:
    """Read a JSON list of paths.

    Raises:
        ValueError: the file cannot be read or is not such a list.
    """
    try:
        paths = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"tree.paths={path}: {error}; expected a JSON list of paths such as [[0], [1], [0, 0]]"
        ) from error
    if not isinstance(paths, list) or not all(isinstance(item, list) for item in paths):
        raise ValueError(f"tree.paths={path}: expected a JSON list of paths such as [[0], [1], [0, 0]]")
    return paths


def _take(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.index_select(1, index)


def _index(positions: list[int], size: int) -> Tensor | None:
    """`positions` as an index, or None where it would select all `size` of them in order."""
    return None if positions == list(range(size)) else torch.tensor(positions)


def _plan_levels(paths: list[Ranks]) -> list[Level]:
    """Precompute the gathers and masks of each level; runs once per tree."""
    has_child = {path[:-1] for path in paths}
    by_depth = [[p for p in paths if len(p) == d] for d in range(len(paths[-1]) + 1)]
    parents: list[Ranks] = [()]  # the previous level's nodes that were forwarded
    written: list[Ranks] = []  # all provisional draft rows so far
    levels = []
    for nodes in by_depth[1:]:
        top_k = 1 + max(path[-1] for path in nodes)
        picks = [parents.index(path[:-1]) * top_k + path[-1] for path in nodes]
        pick_C = _index(picks, len(parents) * top_k)
        inner = [path for path in nodes if path in has_child]
        if not inner:
            levels.append(Level(top_k, pick_C, 0))
            break
        written += inner
        sees = torch.tensor([[other == p[: len(other)] for other in written] for p in inner])
        levels.append(
            Level(
                top_k,
                pick_C,
                len(inner),
                _index([nodes.index(path) for path in inner], len(nodes)),
                _index([parents.index(path[:-1]) for path in inner], len(parents)),
                None if sees.all() else sees[None],
            )
        )
        parents = inner
    return levels
