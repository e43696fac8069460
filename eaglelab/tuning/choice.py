"""Costs and replays together: the tree with the most tokens per second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eaglelab.decoding import Chain, DynamicTree, TreePolicy
from eaglelab.tuning.costs import Costs
from eaglelab.tuning.replay import Replay, Round


@dataclass(frozen=True)
class Shape:
    """A tree that a replay can predict: a dynamic one. Of width 1 and without a floor it is a chain."""

    width: int
    depth: int
    budget: int
    floor: float = 0.0

    @classmethod
    def of(cls, tree: TreePolicy) -> Shape | None:
        """The same tree; None for one that no replay predicts."""
        if isinstance(tree, DynamicTree):
            return cls(tree.width, tree.max_depth, tree.max_nodes, tree.floor)
        return cls(1, tree.max_depth, tree.max_depth) if isinstance(tree, Chain) else None

    @property
    def is_chain(self) -> bool:
        return self.width == 1 and self.floor == 0

    def policy(self) -> TreePolicy:
        if self.is_chain:
            return Chain(min(self.depth, self.budget))
        return DynamicTree(self.width, self.depth, self.budget, self.floor)

    @property
    def overrides(self) -> str:
        """As settings of `eaglelab evaluate` and `eaglelab generate`."""
        if self.is_chain:
            return f"tree=chain tree.depth={min(self.depth, self.budget)}"
        floor = f" tree.floor={self.floor:g}" if self.floor else ""
        return f"tree=dynamic tree.width={self.width} tree.depth={self.depth} tree.budget={self.budget}{floor}"

    def __str__(self) -> str:
        if self.is_chain:
            return f"chain {min(self.depth, self.budget)}"
        floor = f", floor {self.floor:g}" if self.floor else ""
        return f"dynamic {self.width}/{self.depth}/{self.budget}{floor}"


@dataclass(frozen=True)
class Grid:
    """Which trees are considered: every width with every budget and floor, at every depth down to `depth`."""

    widths: Sequence[int] = (1, 2, 3, 4, 6, 10)
    depth: int = 8
    budgets: Sequence[int] = (4, 6, 8, 12, 16, 24, 32, 48, 59)
    floors: Sequence[float] = field(default=(0.0, 0.02, 0.05, 0.1, 0.2))

    def __post_init__(self) -> None:
        for name, values in (("widths", self.widths), ("budgets", self.budgets)):
            if not values or any(type(value) is not int or value < 1 for value in values):
                raise ValueError(f"{name}={list(values)}: give whole numbers >= 1")
        if type(self.depth) is not int or self.depth < 1:
            raise ValueError(f"depth={self.depth!r}: give a whole number >= 1")
        if not self.floors or any(not 0 <= floor < 1 for floor in self.floors):
            raise ValueError(f"floors={list(self.floors)}: give probabilities in [0, 1)")

    def shapes(self) -> Iterator[Shape]:
        """Each tree once: a budget above what a tree can hold, or a depth above its budget, is another's."""
        seen = set()
        for width in self.widths:
            for depth in range(1, self.depth + 1):
                for budget in self.budgets:
                    for floor in self.floors:
                        nodes = width + width**2 * (depth - 1)
                        shape = Shape(width, min(depth, budget), min(budget, nodes), floor)
                        if shape not in seen:
                            seen.add(shape)
                            yield shape


@dataclass(frozen=True)
class Prediction:
    """What a tree will do.

    tau: accepted draft tokens per round, plus one, on the recorded text; exact.
    tokens_per_s: with the measured costs, the batch together.
    speedup: over a plain step of the same batch.
    rows: verified per round, the root's included; levels: drafter forwards per round.
    """

    shape: Shape
    tau: float
    tokens_per_s: float
    speedup: float
    rows: float
    levels: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "tree": self.shape.policy().settings(),
            "tau": self.tau,
            "tokens_per_s": self.tokens_per_s,
            "speedup": self.speedup,
            "rows": self.rows,
            "levels": self.levels,
        }


def predict(replay: Replay, costs: Costs, shape: Shape, batch: int = 1) -> Prediction:
    """Replay a tree and add up what its rounds cost; errors are those of `Replay.rounds`."""
    answers = replay.rounds(shape.width, shape.depth, shape.budget, shape.floor)
    rounds = [one for answer in answers for one in answer]
    seconds = sum(_seconds(costs, one) for one in rounds)
    tokens = sum(one.published for one in rounds)
    return Prediction(
        shape,
        tau=1 + sum(one.accepted for one in rounds) / len(rounds),
        tokens_per_s=batch * tokens / seconds,
        speedup=tokens * costs.plain_round() / seconds,
        rows=sum(one.rows for one in rounds) / len(rounds),
        levels=sum(len(one.forwarded) for one in rounds) / len(rounds),
    )


def choose(replay: Replay, costs: Costs, grid: Grid, batch: int = 1) -> list[Prediction]:
    """Every tree of the grid that was recorded, the fastest first."""
    found = [
        predict(replay, costs, shape, batch)
        for shape in grid.shapes()
        if shape.width in replay.widths and shape.depth <= replay.depth
    ]
    return sorted(found, key=lambda one: -one.tokens_per_s)


def _seconds(costs: Costs, one: Round) -> float:
    return costs.round(one.rows, one.forwarded) if one.drafts else costs.plain_round()
