"""A draft tree, and the one flat layout that verification and commit share.

Letters: B batch (or 1 where all sequences share it), N nodes, R = N + 1 flat rows, L = depth + 1
rows of a path.

Row 0 is the root (the frontier token); node i of a tree is row i + 1. Nothing after `flatten` looks
a node up by its token: equal tokens at different nodes are different rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from eaglelab.ops import on_device


@dataclass(frozen=True)
class Topology:
    """The shape of a tree: everything about it that does not depend on tokens.

    parent_BR: row of each row's parent; the root is its own.
    depth_BR: level of each row; the root's is 0. Target position = length + depth.
    ancestor_BRR: [b, i, j] is True where row j is row i or one of its ancestors.
    path_BRL: the retrieve map. [b, r, :depth[r] + 1] are the rows from the root down to r; the
        rest repeats r.
    chain: row i + 1 is the child of row i throughout, so that the ancestry mask is the causal one.
    """

    parent_BR: Tensor
    depth_BR: Tensor
    ancestor_BRR: Tensor
    path_BRL: Tensor
    chain: bool = False

    @classmethod
    def from_parents(cls, parent_BN: Tensor, max_depth: int, *, chain: bool = False) -> Topology:
        """Build from each node's parent row, without a loop over nodes and without a host sync.

        Args:
            parent_BN: int64; a parent's row is smaller than its children's.
            max_depth: level of the deepest node, or more.
        """
        B, N = parent_BN.shape
        parent_BR = torch.nn.functional.pad(parent_BN, (1, 0))
        climbs = [torch.arange(N + 1, device=parent_BN.device).expand(B, -1)]
        climbs += [parent_BR]  # [k]: each row's k-th ancestor, staying at the root
        for _ in range(max_depth - 1):
            climbs.append(parent_BR.gather(1, climbs[-1]))
        climb_BRL = torch.stack(climbs[: max_depth + 1], dim=-1)
        depth_BR = climb_BRL.count_nonzero(-1)
        level_L = torch.arange(max_depth + 1, device=parent_BN.device)
        steps_up_BRL = (depth_BR[..., None] - level_L).clamp_(min=0)
        ancestor_BRR = torch.zeros(B, N + 1, N + 1, dtype=torch.bool, device=parent_BN.device)
        ancestor_BRR.scatter_(2, climb_BRL, True)
        path_BRL = climb_BRL.gather(2, steps_up_BRL)
        return cls(parent_BR, depth_BR, ancestor_BRR, path_BRL, chain)

    def to(self, device: torch.device | str) -> Topology:
        return Topology(
            self.parent_BR.to(device),
            self.depth_BR.to(device),
            self.ancestor_BRR.to(device),
            self.path_BRL.to(device),
            self.chain,
        )

    @property
    def rows(self) -> int:
        return self.parent_BR.shape[1]

    @cached_property
    def leaf_BR(self) -> Tensor:
        """True where a row has no child; its path is one of the tree's candidates."""
        has_child_BR = torch.zeros_like(self.parent_BR, dtype=torch.bool)
        has_child_BR.scatter_(1, self.parent_BR[:, 1:], True)
        return ~has_child_BR


@dataclass(frozen=True)
class Proposals:
    """What the children of a sampled tree were drawn from, without replacement.

    Letters: E rows that have children, K most children of a row, Vd draft vocabulary.

    q_BEV: float32 [B, E, Vd], each row's processed draft distribution, summing to 1.
    slot_R: int64, the place in E of a flat row; -1 for rows without children.
    children_EK: int64, flat rows of the children in the order in which they were drawn; -1 behind the last.
    target_ids_V: int64 [Vd], draft id -> target id.
    """

    q_BEV: Tensor
    slot_R: Tensor
    children_EK: Tensor
    target_ids_V: Tensor


@dataclass(frozen=True)
class Candidates:
    """What a grown tree looked at, kept or not. Letters: M candidates in the order of recording, N kept.

    parent_BM: row of each one's parent: 0 is the root, m + 1 is candidate m.
    value_BM: log-probability of each one's path.
    kept_BN: the tree's nodes, as places in M.
    """

    parent_BM: Tensor
    tokens_BM: Tensor
    value_BM: Tensor
    kept_BN: Tensor


@dataclass(frozen=True)
class FlatTree:
    """A tree laid out as rows of one target forward; see `Topology` for the maps.

    tokens_BR: the root's token, then the nodes'.
    log_values_BR: log-probability of each row's path under the drafter; the root's is 0. Unused by
        greedy verification; None when nothing was drafted.
    proposals: set when the nodes were sampled; they then need the sampled-tree rule at T > 0.
    expanded: draft nodes that were looked at before the tree was chosen.
    candidates: these nodes, where the tree is a choice among them.
    """

    tokens_BR: Tensor
    topology: Topology
    log_values_BR: Tensor | None = None
    proposals: Proposals | None = None
    expanded: int = 0
    candidates: Candidates | None = None

    @property
    def rows(self) -> int:
        return self.tokens_BR.shape[1]

    @property
    def nodes(self) -> int:
        return self.rows - 1

    @property
    def mask_BRR(self) -> Tensor | None:
        """The ancestry mask for the target, or None where it is just the causal one."""
        if self.topology.chain:
            return None
        return self.topology.ancestor_BRR.expand(self.tokens_BR.shape[0], -1, -1)

    def copied(self) -> FlatTree:
        """With nodes that stay when the next round is replayed (`eaglelab.kernels.recording`)."""
        topology = replace(
            self.topology, parent_BR=self.topology.parent_BR.clone(), depth_BR=self.topology.depth_BR.clone()
        )
        looked_at = self.candidates
        if looked_at is not None:
            looked_at = Candidates(*(getattr(looked_at, one.name).clone() for one in fields(looked_at)))
        return replace(self, topology=topology, candidates=looked_at)

    def only_for(self, drafting: Sequence[bool]) -> FlatTree:
        """The other sequences keep their root row alone: their nodes get the token -1, which nothing accepts."""
        if all(drafting) or self.nodes == 0:
            return self
        drafting_B1 = on_device(drafting, self.tokens_BR.device)[:, None]
        tokens_BR = torch.where(drafting_B1, self.tokens_BR, -1)
        tokens_BR[:, 0] = self.tokens_BR[:, 0]
        return replace(self, tokens_BR=tokens_BR)


@dataclass(frozen=True)
class Tree:
    """Drafted nodes, parents before children.

    tokens_BN: target vocabulary ids. Siblings differ; other nodes may repeat a token.
    log_values_BN: float32, parent's value + log p(token); p at temperature 1.
    topology: parents and depths, shared by all sequences (leading size 1) or one each.
    proposals: where sampled nodes came from.
    expanded: nodes that were looked at; those here are the ones retained.
    candidates: the nodes that were looked at, where there are more than those here.
    """

    tokens_BN: Tensor
    log_values_BN: Tensor
    topology: Topology
    proposals: Proposals | None = None
    expanded: int = 0
    candidates: Candidates | None = None

    @property
    def parents_BN(self) -> Tensor:
        """Row of each node's parent: 0 is the root, i + 1 is node i."""
        return self.topology.parent_BR[:, 1:]

    @property
    def depths_BN(self) -> Tensor:
        return self.topology.depth_BR[:, 1:]

    def flatten(self, root_B1: Tensor) -> FlatTree:
        """Put the root's token in row 0 and the nodes after it."""
        tokens_BR = torch.cat([root_B1, self.tokens_BN], dim=1)
        log_values_BR = torch.nn.functional.pad(self.log_values_BN, (1, 0))
        return FlatTree(tokens_BR, self.topology, log_values_BR, self.proposals, self.expanded, self.candidates)


_ROOT_ONLY: dict[torch.device, Topology] = {}


def root_only(root_B1: Tensor) -> FlatTree:
    """The tree with no node: verifying it is one step of plain decoding."""
    device = root_B1.device
    if device not in _ROOT_ONLY:
        no_nodes = torch.zeros(1, 0, dtype=torch.int64)
        _ROOT_ONLY[device] = Topology.from_parents(no_nodes, 0, chain=True).to(device)
    return FlatTree(root_B1, _ROOT_ONLY[device])


def parents_of_paths(paths: Sequence[Sequence[int]]) -> list[int]:
    """Each path's parent row, for paths of child ranks sorted so that parents come first.

    Raises:
        ValueError: a path whose parent is not in the list, a path twice, an empty path or a rank
            that is not a whole number >= 0.
    """
    row_of: dict[tuple[int, ...], int] = {(): 0}
    parents = []
    for path in paths:
        key = tuple(path)
        if not key or any(type(rank) is not int or rank < 0 for rank in key):
            raise ValueError(
                f"static tree: {list(path)!r} is not a path; write a non-empty list of child ranks "
                "counted from 0, such as [0, 2] for the third child of the best first token"
            )
        if key in row_of:
            raise ValueError(f"static tree: path {list(key)} is listed twice; remove one")
        if key[:-1] not in row_of:
            raise ValueError(f"static tree: path {list(key)} has no parent; add {list(key[:-1])} to the list")
        parents.append(row_of[key[:-1]])
        row_of[key] = len(row_of)
    return parents
