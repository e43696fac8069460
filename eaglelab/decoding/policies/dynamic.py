"""EAGLE-2's dynamic tree: the drafter's own confidence decides where a tree grows.

Letters: B batch, K width, W <= K frontier nodes of the newest level, P provisional draft rows so far, M candidates
recorded so far or at one level, N nodes kept, R = M + 1 rows with the root, d hidden, V draft vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eaglelab.decoding.protocol import Drafter, DraftSeed, DraftState
from eaglelab.decoding.tree import Candidates, Topology, Tree

MOST = 1000
"""Of every setting; beyond it a round takes gigabytes."""


class DynamicTree:
    """Grow by path value, then keep the best nodes of all levels.

    Level 1 is the root's `width` best children. Then, level by level, the `width` best nodes of the newest level are
    forwarded and `width` children of each are recorded. The `budget` best of all recorded nodes are the tree. A
    node's value is the sum of log p along its path, p at temperature 1 whatever the sampling temperature; equal values
    go to the shallower, then to the earlier recorded node.

    Source: EAGLE-2; contracts, section 6. The pinned code's `depth` d is `depth=d + 1` here, where the deepest level
    counts, and its `total_tokens` t is `budget=t - 1`, without the root. The defaults are its 60 / 5 / 10.

    A NaN from the drafter cannot break the tree and costs no host sync: such nodes rank last, like impossible ones,
    and the target decides every token anyway. Their NaN stays in the tree's log values, where telemetry shows it.

    Args:
        width: children recorded per node, and nodes forwarded per level.
        depth: deepest level that is grown. A level below `budget` could not be kept and is not grown.
        budget: most nodes to verify.
        floor: least path probability of a node that is forwarded or, but for the best one, verified. Where no node of
            a level has it, drafting stops. The output stays exact, as with any tree; tau falls a little, and rounds
            get cheaper where drafter levels and rows cost. In a batch the sequence with most such nodes decides. Above
            0, the host waits for the device once per level and once more.

    Raises:
        ValueError: width, depth or budget is not a whole number >= 1, or `floor` not in [0, 1).
    """

    name = "dynamic"
    samples = False

    def __init__(self, width: int = 10, depth: int = 6, budget: int = 59, floor: float = 0.0) -> None:
        for setting, value in (("width", width), ("depth", depth), ("budget", budget)):
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"tree.{setting}={value!r}: a dynamic tree needs a whole number >= 1; use tree=none to decode "
                    "without a drafter"
                )
            if value > MOST:
                raise ValueError(f"tree.{setting}={value}: at most {MOST:,}; a round holds width * width candidates")
        if not 0 <= floor < 1:
            raise ValueError(f"tree.floor={floor!r} must be a probability in [0, 1); 0 keeps every node")
        self.width, self.depth, self.budget, self.floor = width, depth, budget, float(floor)
        self.max_depth = min(depth, budget)
        self.max_step_rows = width * (self.max_depth - 1)
        self.expanded = width + width * self.max_step_rows
        self.max_nodes = min(budget, self.expanded)

    @property
    def asks_host(self) -> bool:
        """A floor is held against values of the device."""
        return self.floor > 0

    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "nodes": self.max_nodes,
            "depth": self.depth,
            "width": self.width,
            "budget": self.budget,
            **({"floor": self.floor} if self.floor else {}),
        }

    def draft(self, drafter: Drafter, state: DraftState, seed: DraftSeed) -> Tree:
        """One drafter call per level but the last; every sequence gets its own tree, without a host sync.

        Raises:
            ValueError: `width` is above the draft vocabulary.
        """
        return self._prune(*self.grow(drafter, state, seed))

    def grow(self, drafter: Drafter, state: DraftState, seed: DraftSeed) -> tuple[Tensor, Tensor, Tensor, int]:
        """All candidates, before the best are chosen: parents' rows, tokens and path values [B, M], level by level, and
        how many levels there are. Rows are those of `prune`."""
        K, device = self.width, seed.hidden_B1d.device
        value_BM, tokens_BM = self._children(drafter, seed.hidden_B1d, torch.zeros(seed.batch, 1, device=device))
        values, tokens, fronts = [value_BM], [tokens_BM], list[Tensor]()
        hidden_BWd, sees_BWP = seed.hidden_B1d, None
        first_row = 1  # of the newest level, in the order of recording
        for level in range(1, self.max_depth):
            W = self._worth(value_BM, K)
            if W == 0:
                break
            front_BW = best_first(value_BM)[:, :W]
            self_BWW = torch.eye(W, dtype=torch.bool, device=device).expand(seed.batch, -1, -1)
            if sees_BWP is None:
                hidden_BWd, sees_BWP = hidden_BWd.expand(-1, W, -1), self_BWW
            else:
                above_BW = front_BW // K  # each node's parent, as a place in the frontier before
                hidden_BWd = _gather_rows(hidden_BWd, above_BW)
                sees_BWP = torch.cat([_gather_rows(sees_BWP, above_BW), self_BWW], dim=-1)
            value_BW, tokens_BW = value_BM.gather(1, front_BW), tokens_BM.gather(1, front_BW)
            position_BW = (seed.position_B1 + level).expand_as(tokens_BW)
            hidden_BWd = drafter.step(state, hidden_BWd, tokens_BW, position_BW, sees_BWP)
            fronts.append(front_BW + first_row)
            first_row += value_BM.shape[1]
            value_BM, tokens_BM = self._children(drafter, hidden_BWd, value_BW)
            values.append(value_BM)
            tokens.append(tokens_BM)
        parents_BM = torch.zeros_like(tokens[0])
        if fronts:
            parents_BMK = torch.cat(fronts, dim=1)[..., None].expand(-1, -1, K)
            parents_BM = torch.nn.functional.pad(parents_BMK.flatten(1), (parents_BM.shape[1], 0))
        return parents_BM, torch.cat(tokens, dim=1), torch.cat(values, dim=1), len(values)

    def _worth(self, value_BM: Tensor, most: int) -> int:
        """How many nodes reach the floor in the sequence that has most of them; `most` without a floor."""
        if self.floor == 0:
            return min(most, value_BM.shape[1])
        return min(most, int((value_BM >= math.log(self.floor)).sum(dim=1).max()))

    def _children(self, drafter: Drafter, hidden_BWd: Tensor, value_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Path values and tokens [B, W * width] of every node's best children, node by node."""
        log_p_BWV = drafter.log_probs(hidden_BWd)
        vocabulary = log_p_BWV.shape[-1]
        if self.width > vocabulary:
            raise ValueError(
                f"tree=dynamic takes {self.width} children of one node, but the draft vocabulary has {vocabulary} "
                f"tokens; use tree.width={vocabulary} or less"
            )
        log_p_BWK, ids_BWK = log_p_BWV.topk(self.width, dim=-1)
        parent_BW1 = value_BW.unsqueeze(-1)
        value_BWK = torch.minimum(parent_BW1 + log_p_BWK, parent_BW1)
        return value_BWK.flatten(1), drafter.to_target_ids(ids_BWK).flatten(1)

    def _prune(self, parent_BM: Tensor, tokens_BM: Tensor, value_BM: Tensor, levels: int) -> Tree:
        kept_BN, parent_BN = prune(parent_BM, value_BM, max(self._worth(value_BM, self.budget), 1))
        topology = Topology.from_parents(parent_BN, levels, chain=self.width == 1)
        return Tree(
            tokens_BM.gather(1, kept_BN),
            value_BM.gather(1, kept_BN),
            topology,
            expanded=value_BM.shape[1],
            candidates=Candidates(parent_BM, tokens_BM, value_BM, kept_BN),
        )


def prune(parent_BM: Tensor, value_BM: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Keep the `budget` best candidates of each sequence, all of them where there are fewer.

    Candidates stand in the order in which they were recorded, level by level, so that a stable sort by value also
    puts the shallower and then the earlier of two equals first. A child's value is at most its parent's, hence the
    best nodes include their ancestors; none is added afterwards.

    Args:
        parent_BM: int64, row of each candidate's parent: 0 is the root, m + 1 is candidate m.
        value_BM: path values, -inf and NaN last.

    Returns:
        kept_BN: int64, the kept candidates in the order of recording.
        parent_BN: int64, row of each one's parent among the kept: 0 is the root, i + 1 is kept candidate i.
    """
    kept_BN = best_first(value_BM)[:, :budget].sort(dim=1).values
    row_1N = torch.arange(1, kept_BN.shape[1] + 1, device=kept_BN.device).expand_as(kept_BN)
    row_BR = parent_BM.new_zeros(parent_BM.shape[0], parent_BM.shape[1] + 1).scatter_(1, kept_BN + 1, row_1N)
    return kept_BN, row_BR.gather(1, parent_BM.gather(1, kept_BN))


def best_first(value_BM: Tensor) -> Tensor:
    """Indices of the values, largest first, equals in order, NaN with -inf."""
    ranked_BM = value_BM.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return ranked_BM.sort(dim=1, descending=True, stable=True).indices


def _gather_rows(values_BWn: Tensor, rows_BW: Tensor) -> Tensor:
    if values_BWn.shape[0] == 1:
        return values_BWn.index_select(1, rows_BW[0])
    return values_BWn.gather(1, rows_BW[..., None].expand(-1, -1, values_BWn.shape[-1]))
