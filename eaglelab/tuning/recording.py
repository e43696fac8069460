"""What the drafter proposes at every place of a text, wide and deep, while the target decodes plainly.

Letters: B batch, M candidates of one growth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eaglelab.decoding import Drafter, DraftSeed, DynamicTree, Engine, RoundRecord, Topology, Tree

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget


@dataclass(frozen=True)
class Growth:
    """All candidates of one dynamic tree at one place, level by level: `width`, then `width` squared per level.

    parent_M: row of each one's parent: 0 is the root, m + 1 candidate m.
    value_M: log-probability of each one's path.
    """

    parent_M: Tensor
    tokens_M: Tensor
    value_M: Tensor


@dataclass
class Recording:
    """An answer, and what was drafted on the way.

    tokens: of the answer; the target's own, so those of every tree (greedy, or with a seed and a deterministic tree).
    growths: [k][width], drafted with token k as the root; None where the engine would not draft either.
    """

    tokens: list[int]
    growths: list[dict[int, Growth] | None] = field(default_factory=list)


class Recorder:
    """A tree policy that drafts for every width, keeps the candidates and verifies nothing.

    A frontier of a narrow tree need not be part of a wide one's: nodes elsewhere can push it out. So each width grows
    for itself, which makes a replay exact.
    """

    name = "recorder"
    samples = False
    asks_host = False
    max_nodes = 0

    def __init__(self, widths: Sequence[int], depth: int) -> None:
        self.trees = {width: DynamicTree(width, depth, depth) for width in widths}
        self.max_depth = depth
        self.max_step_rows = max(tree.max_step_rows for tree in self.trees.values())
        self.grown: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def settings(self) -> dict[str, Any]:
        return {"name": self.name, "widths": list(self.trees), "depth": self.max_depth}

    def draft(self, drafter: Drafter, state: Any, seed: DraftSeed) -> Tree:
        """Grow every width's tree, one after the other, and return one without nodes."""
        for width, tree in self.trees.items():
            *grown, _ = tree.grow(drafter, state, seed)
            self.grown[width] = tuple(grown)  # type: ignore[assignment]
            drafter.discard(state)
        nothing = torch.zeros(1, 0, dtype=torch.int64, device=seed.hidden_B1d.device)
        tokens_BN = nothing.expand(seed.batch, 0)
        expanded = sum(tokens_BM.shape[1] for _, tokens_BM, _ in self.grown.values())
        return Tree(tokens_BN, tokens_BN.float(), Topology.from_parents(nothing, 0, chain=True), expanded=expanded)

    def growths(self, sequence: int) -> dict[int, Growth]:
        """What the last call grew for one sequence of the batch."""
        return {
            width: Growth(*(values_BM[sequence].cpu() for values_BM in grown)) for width, grown in self.grown.items()
        }


def record(
    target: FrozenTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    widths: Sequence[int],
    depth: int,
    max_new_tokens: int,
    batch: int = 8,
    stop_ids: frozenset[int] | None = None,
    on_answer: Callable[[], None] | None = None,
) -> list[Recording]:
    """Decode prompts greedily and draft, at every place, a tree of every width down to `depth`.

    Args:
        batch: prompts decoded together.
        on_answer: called after each answer.

    Returns:
        One recording per prompt, in their order.

    Raises:
        ValueError: no width, a width or a depth below 1, or what `Engine.generate` says about the prompts.
    """
    if not widths:
        raise ValueError("widths=[]: give the widths that may be chosen, such as [1,2,4]")
    recorder = Recorder(widths, depth)
    growths: list[list[dict[int, Growth] | None]] = [[] for _ in prompts]

    def keep(records: list[RoundRecord]) -> None:
        for sequence, one in enumerate(records):
            growths[one.request].append(recorder.growths(sequence) if one.expanded else None)

    results = Engine(target, drafter, recorder).generate(
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        batch=batch,
        on_round=keep,
        on_finish=None if on_answer is None else lambda number, result: on_answer(),
    )
    return [Recording(result.tokens, grown) for result, grown in zip(results, growths, strict=True)]
