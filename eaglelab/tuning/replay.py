"""Smaller trees on recorded drafts: exactly what a real decode would have had accepted, round by round.

The text is the target's, whatever the tree. So a drafted node is accepted if its path is how the text goes on, and a
dynamic tree of any width, depth, budget and floor is a choice among the recorded candidates.

Letters: P places where drafts were recorded, M candidates of one growth, M_d those of its first d levels, L levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eaglelab.decoding.policies.dynamic import best_first
from eaglelab.tuning.recording import Recording


@dataclass(frozen=True)
class Round:
    """One round of a replayed decode.

    rows: of the target's forward pass, the root included.
    forwarded: nodes that the drafter ran per level; empty where only the root's children were drafted.
    drafts: False where the engine would not draft.
    """

    accepted: int
    published: int
    rows: int
    forwarded: tuple[int, ...]
    drafts: bool


class Replay:
    """Recordings, ready to be decoded again with other trees.

    Raises:
        ValueError: nothing was drafted in them.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = list(recordings)
        places = [(one, k) for one in self.recordings for k, growth in enumerate(one.growths) if growth is not None]
        if not places:
            raise ValueError("nothing was drafted in the recorded answers: raise max_new_tokens or limit")
        self.number_of = {(id(one), k): p for p, (one, k) in enumerate(places)}
        first = places[0][0].growths[places[0][1]]
        assert first is not None
        self.widths = list(first)
        self.depth = max(1 + (len(growth.tokens_M) - width) // width**2 for width, growth in first.items())
        self._tables = {width: _Table(width, self.depth, places) for width in self.widths}

    @property
    def places(self) -> int:
        return len(self.number_of)

    def rounds(self, width: int, depth: int, budget: int, floor: float = 0.0) -> list[list[Round]]:
        """The rounds of every answer with `DynamicTree(width, depth, budget, floor)`, at batch 1.

        Raises:
            ValueError: a width that was not recorded, or a depth beyond the recorded one.
        """
        if width not in self._tables or not 1 <= depth <= self.depth:
            raise ValueError(
                f"width {width}, depth {depth}: recorded are widths {self.widths} down to depth {self.depth}"
            )
        accepted, rows, forwarded = self._tables[width].decide(min(depth, budget), budget, floor)
        return [self._walk(one, accepted, rows, forwarded) for one in self.recordings]

    def _walk(
        self, one: Recording, accepted: list[int], rows: list[int], forwarded: list[tuple[int, ...]]
    ) -> list[Round]:
        found, place = [], 0
        while (left := len(one.tokens) - 1 - place) > 0:
            p = self.number_of.get((id(one), place))
            if p is None:
                found.append(Round(0, 1, 1, (), False))
            else:
                published = min(accepted[p] + 1, left)
                found.append(Round(min(accepted[p], left), published, rows[p], forwarded[p], True))
            place += found[-1].published
        return found


class _Table:
    """The growths of one width at all places, and which of their nodes the text follows."""

    def __init__(self, width: int, depth: int, places: Sequence[tuple[Recording, int]]) -> None:
        self.width, self.depth = width, depth
        growths = [growth[width] for one, k in places if (growth := one.growths[k]) is not None]
        self.value_PM = torch.stack([growth.value_M for growth in growths])
        goes_on = [one.tokens[k + 1 : k + 1 + depth] for one, k in places]
        text_PL = torch.tensor([line + [-1] * (depth - len(line)) for line in goes_on])
        parent_PM = torch.stack([growth.parent_M for growth in growths])
        tokens_PM = torch.stack([growth.tokens_M for growth in growths])
        self.followed_PL = _followed(
            parent_PM, tokens_PM, text_PL, [self._level(level) for level in range(1, depth + 1)]
        )
        self._ranks: dict[int, Tensor] = {}

    def decide(self, depth: int, budget: int, floor: float) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        """Accepted nodes, rows verified and nodes forwarded per level, by place."""
        candidates = self._level(depth).stop
        value_PM = self.value_PM[:, :candidates]
        P = len(value_PM)
        least = math.log(floor) if floor else -math.inf
        worth_P = (value_PM >= least).sum(dim=1) if floor else torch.full((P,), candidates)
        nodes_P = worth_P.clamp(min=1, max=budget)
        accepted_P = (self._rank(depth) < nodes_P[:, None]).sum(dim=1)
        if floor:
            per_level = [(value_PM[:, self._level(level)] >= least).sum(dim=1) for level in range(1, depth)]
            widths = [count_P.clamp(max=self.width) for count_P in per_level]
            lines = torch.stack(widths, dim=1).tolist() if widths else [[]] * P
            forwarded = [tuple(line[: line.index(0)] if 0 in line else line) for line in lines]
        else:
            forwarded = [(self.width,) * (depth - 1)] * P
        return accepted_P.tolist(), (nodes_P + 1).tolist(), forwarded

    def _rank(self, depth: int) -> Tensor:
        """[P, depth]: among the candidates of the first `depth` levels, the place by value of the node of each level
        that the text follows; beyond all of them where there is none."""
        if depth not in self._ranks:
            candidates = self._level(depth).stop
            order_PM = best_first(self.value_PM[:, :candidates])
            place_PM = torch.arange(candidates).expand_as(order_PM)
            rank_PM = torch.empty_like(order_PM).scatter_(1, order_PM, place_PM)
            node_PL = self.followed_PL[:, :depth]
            rank_PL = rank_PM.gather(1, node_PL.clamp(min=0))
            self._ranks[depth] = rank_PL.masked_fill(node_PL < 0, candidates + 1)
        return self._ranks[depth]

    def _level(self, level: int) -> slice:
        """Columns of a level's candidates."""
        stop = self.width + (level - 1) * self.width**2
        return slice(0 if level == 1 else stop - self.width**2, stop)


def _followed(parent_PM: Tensor, tokens_PM: Tensor, text_PL: Tensor, levels: Sequence[slice]) -> Tensor:
    """[P, L]: the candidate of each level whose path is the text; -1 where there is none."""
    row_P = torch.zeros(len(text_PL), dtype=torch.int64)
    found = []
    for depth, level in enumerate(levels):
        is_it_PC = (tokens_PM[:, level] == text_PL[:, depth, None]) & (parent_PM[:, level] == row_P[:, None])
        node_P = torch.where(is_it_PC.any(dim=1), is_it_PC.int().argmax(dim=1) + level.start, -1)
        found.append(node_P)
        row_P = torch.where(node_P < 0, -1, node_P + 1)
    return torch.stack(found, dim=1)
