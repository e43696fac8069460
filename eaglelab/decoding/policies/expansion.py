"""EAGLE-2's tree for given confidences: the plain, checked form of what `DynamicTree` does with tensors.

For reasoning about a tree by hand and for comparing the tensor version with; it never runs in a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

MASS_TOLERANCE = 1e-12


@dataclass(frozen=True, eq=False)
class Node:
    """A candidate. Two nodes are the same only if they are the same object.

    confidence: p(token | the parent's path), as given; the children of a node may leave mass to others.
    value: log-probability of the path from the root.
    place: number in the order of recording, over all levels.
    """

    parent: Node | None
    token: int | str
    confidence: float
    value: float
    level: int
    place: int

    @property
    def path(self) -> tuple[int | str, ...]:
        """Tokens from the root's child down to here; empty for the root."""
        return () if self.parent is None else (*self.parent.path, self.token)


Proposal = tuple[Node, int | str, float]
"""A child: parent, token, confidence."""


def grow(expand: Callable[[Sequence[Node]], Iterable[Proposal]], *, width: int, depth: int, budget: int) -> list[Node]:
    """Grow up to `depth` levels from the root and keep the `budget` best nodes.

    Each round, `expand` gets the best `width` nodes of the newest level, the first time the root alone, and says which
    children they have. Source: EAGLE-2; article, 0x06B.

    Returns:
        The kept nodes, best first; equal values by level, then by place. Every node comes after its parent.

    Raises:
        ValueError: width < 1, a negative depth or budget, a setting that is no whole number; a child whose parent was
            not asked for, whose confidence is not a probability, that its parent has already, or that brings the
            children of its parent above a total confidence of 1.
    """
    for name, setting, least in (("width", width, 1), ("depth", depth, 0), ("budget", budget, 0)):
        if type(setting) is not int or setting < least:
            raise ValueError(f"{name}={setting!r}: give a whole number >= {least}")
    root = Node(None, "", 1.0, 0.0, 0, -1)
    recorded: list[Node] = []
    newest = [root]
    for level in range(1, depth + 1 if budget else 1):
        frontier = sorted(newest, key=_rank)[:width]
        children = _Children(frontier)
        newest = []
        for parent, token, confidence in expand(frontier) if frontier else ():
            children.check(parent, token, confidence)
            value = parent.value + (math.log(confidence) if confidence > 0 else -math.inf)
            newest.append(Node(parent, token, confidence, value, level, len(recorded) + len(newest)))
        recorded += newest
    return sorted(recorded, key=_rank)[:budget]


@dataclass
class _Children:
    """What the frontier's nodes have been given so far."""

    frontier: Sequence[Node]
    mass: dict[Node, float] = field(default_factory=dict)
    seen: set[tuple[Node, int | str]] = field(default_factory=set)

    def check(self, parent: Node, token: int | str, confidence: float) -> None:
        child = f"child {token!r} of {list(parent.path)}"
        if parent not in self.frontier:
            raise ValueError(f"{child}: its parent is not in the frontier; return children of the given nodes only")
        if not math.isfinite(confidence) or not 0 <= confidence <= 1:
            raise ValueError(f"{child}: confidence {confidence} is not a probability")
        if (parent, token) in self.seen:
            raise ValueError(f"{child} is given twice; a token may follow a node once")
        mass = self.mass.get(parent, 0.0) + confidence
        if mass > 1 + MASS_TOLERANCE:
            raise ValueError(
                f"{child}: the confidences under its parent sum to {mass:.15g}, more than 1; give conditional "
                "probabilities, log values exponentiated"
            )
        self.seen.add((parent, token))
        self.mass[parent] = mass


def _rank(node: Node) -> tuple[float, int, int]:
    return -node.value, node.level, node.place
