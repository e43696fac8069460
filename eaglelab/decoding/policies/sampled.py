"""A fixed shape filled with tokens that are drawn, without replacement, from the processed draft distribution.

Letters: B batch, W nodes of one level that have children, E nodes that have children, K children of a node, N nodes,
R = N + 1 flat rows, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eaglelab.decoding.policies.fixed import STATIC_25, FixedTree, Ranks
from eaglelab.decoding.protocol import Drafter, DraftSeed, DraftState
from eaglelab.decoding.tree import Proposals, Tree


class SampledTree(FixedTree):
    """Children are drawn one after the other, without replacement; rank r is the child drawn r-th.

    At temperature > 0 the children of a node then come from a known distribution, which verification can use to
    accept more of them than of the most likely tokens (`residual.accept_sampled`). Their order is that of the draw.
    Source: contracts, section 6, sampled trees.

    Args:
        widths: children of every node of a level, level by level; [2, 1] is 2 + 2 nodes.
        paths: any other shape, as in `StaticTree`, except that siblings are ranked 0, 1, 2 without gaps.
            Neither: the 25-node shape of EAGLE-1, so that results compare with tree=static at one budget.

    Raises:
        ValueError: both given, widths that are not whole numbers >= 1, paths that are not such a tree.
    """

    name = "sampled"
    samples = True

    def __init__(self, widths: Sequence[int] | None = None, paths: Sequence[Sequence[int]] | None = None) -> None:
        if widths is not None and paths is not None:
            raise ValueError("sampled tree: give tree.widths or tree.paths, not both")
        if widths is not None:
            paths = _paths_of_widths(list(widths))
        super().__init__(STATIC_25 if paths is None else paths)
        _check_ranks(self.paths)
        self.widths = None if widths is None else list(widths)
        self._slot_R, self._children_EK = _family(self.paths)

    def settings(self) -> dict[str, Any]:
        given = super().settings()
        if self.widths is not None:
            given.pop("paths")
            given["widths"] = self.widths
        return given

    def draft(self, drafter: Drafter, state: DraftState, seed: DraftSeed) -> Tree:
        """Draw the children of every node, level by level.

        Returns:
            The tree with its `Proposals`. A node that draws more children than its distribution has tokens gets
            tokens of probability 0 behind them, which verification passes over. Log values are of the drafter's
            own distribution, at temperature 1.

        Raises:
            ValueError: the seed brings no `noise` or no `warp`, or a node has more children than the draft
                vocabulary has tokens.
        """
        draws = _WithoutReplacement(seed)
        tree = self.fill(drafter, state, seed, draws)
        q_BEV = torch.cat(draws.q, dim=1)
        ids_V = torch.arange(q_BEV.shape[-1], device=q_BEV.device)
        proposals = Proposals(q_BEV, self._slot_R, self._children_EK, drafter.to_target_ids(ids_V))
        return dataclasses.replace(tree, proposals=proposals)

    def move_to(self, device: torch.device) -> None:
        if device != self._device:
            self._slot_R, self._children_EK = self._slot_R.to(device), self._children_EK.to(device)
        super().move_to(device)


class _WithoutReplacement:
    """Draws children by the Gumbel top-K trick: the K largest of log q + Gumbel noise, largest first.

    q: [B, W, V] per call, the distributions that were drawn from.
    """

    def __init__(self, seed: DraftSeed) -> None:
        if seed.noise is None or seed.warp is None:
            raise ValueError(
                "tree=sampled draws its nodes at random: the engine must supply noise and warp in the DraftSeed; "
                "use tree=dynamic or tree=static where it does not"
            )
        self.noise, self.warp = seed.noise, seed.warp
        self.q: list[Tensor] = []

    def __call__(self, log_p_BWV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        log_q_BWV = self.warp(log_p_BWV).float().log_softmax(dim=-1)
        self.q.append(log_q_BWV.exp())
        uniform_BWV = self.noise(tuple(log_p_BWV.shape[1:]))
        # an exact 0 would tie possible tokens with impossible ones
        above_zero_BWV = uniform_BWV.clamp(min=torch.finfo(uniform_BWV.dtype).tiny)
        gumbel_BWV = -(-above_zero_BWV.log()).log()
        ids_BWK = (log_q_BWV + gumbel_BWV).topk(top_k, dim=-1).indices
        return log_p_BWV.gather(-1, ids_BWK), ids_BWK


def _paths_of_widths(widths: list[int]) -> list[Ranks]:
    if not widths or any(type(width) is not int or width < 1 for width in widths):
        raise ValueError(
            f"tree.widths={widths!r}: a sampled tree needs a whole number of children >= 1 for each level, "
            "such as [3, 2, 1]"
        )
    levels = range(1, len(widths) + 1)
    return [path for level in levels for path in itertools.product(*map(range, widths[:level]))]


def _check_ranks(paths: list[Ranks]) -> None:
    known = set(paths)
    for path in paths:
        before = (*path[:-1], path[-1] - 1)
        if path[-1] > 0 and before not in known:
            raise ValueError(
                f"sampled tree: path {list(path)} skips {list(before)}; ranks are the order in which siblings are "
                "drawn, so number them 0, 1, 2 without gaps"
            )


def _family(paths: list[Ranks]) -> tuple[Tensor, Tensor]:
    """`Proposals.slot_R` and `Proposals.children_EK` of a shape, in the order in which nodes are forwarded."""
    children: dict[Ranks, list[int]] = {}
    for row, path in enumerate(paths, start=1):
        children.setdefault(path[:-1], []).append(row)
    inner = [path for path in [(), *paths] if path in children]
    K = max(len(rows) for rows in children.values())
    padded = [children[path] + [-1] * (K - len(children[path])) for path in inner]
    slots = [inner.index(path) if path in children else -1 for path in [(), *paths]]
    return torch.tensor(slots), torch.tensor(padded)
