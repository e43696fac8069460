"""What decoding asks of a drafter and of a tree policy; it never asks which variant they are.

Letters: B batch, N rows, W frontier nodes, P provisional rows, F tapped feature width, d hidden,
Vd draft vocabulary.

Conventions. The committed tokens are x_0..x_n. The last of them, the frontier, is published but not
yet forwarded: target K/V and features exist for 0..n-1. Draft row t reads the feature of x_t and the
token x_{t+1}, so draft rows 0..n-1 exist as well, and the output of row n-1 predicts the children of
the tree's root x_n. A node at level l >= 1 has target position n + l and draft position n - 1 + l.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from eaglelab.decoding.tree import Tree

DraftState = Any  # opaque to decoding: the drafter's own K/V slots


@runtime_checkable
class Drafter(Protocol):
    """A network that proposes tokens from target features.

    Attributes:
        taps: which target states it reads, in the order in which they are concatenated.
        max_positions: positions it may be run at are below this number.
    """

    taps: tuple[Any, ...]
    max_positions: int

    def new_state(self, batch: int, capacity: int) -> DraftState:
        """Empty draft K/V for `batch` sequences of up to `capacity` rows, tree rows included."""

    def extend(
        self,
        state: DraftState,
        features_BNF: Tensor,
        tokens_BN: Tensor,
        position_BN: Tensor,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Add target-derived rows, whose K/V is kept, and return their outputs [B, N, d].

        Only the first `counts[b]` rows of sequence b are real (all of them when None). All rows
        are added or none: a call that raises leaves the kept rows as they were.
        """

    def step(
        self,
        state: DraftState,
        hidden_BWd: Tensor,
        tokens_BW: Tensor,
        position_BW: Tensor,
        ancestor_BWP: Tensor | None,
    ) -> Tensor:
        """Forward W tree nodes as provisional rows and return their outputs [B, W, d].

        `hidden_BWd` is the output at each node's parent. `ancestor_BWP` (bool) says which of the P
        provisional rows written since the last `discard`, these W last, each node sees (None: all
        of them, with W = 1); kept rows are always visible.
        """

    def discard(self, state: DraftState) -> None:
        """Drop every provisional row and keep the target-derived ones."""

    def log_probs(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., Vd] float32 log-probabilities at temperature 1."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary ids -> target vocabulary ids, any shape."""


@dataclass(frozen=True)
class DraftSeed:
    """Where a tree starts.

    hidden_B1d: the drafter's output at row n-1; it predicts the children of the root.
    position_B1: that row's position, n - 1.
    """

    hidden_B1d: Tensor
    position_B1: Tensor

    @property
    def batch(self) -> int:
        return self.hidden_B1d.shape[0]


class TreePolicy(Protocol):
    """Decides which candidates are drafted and verified in a round.

    Attributes:
        name: as in `tree=<name>`.
        max_depth: level of the deepest node it may return.
        max_nodes: most nodes it may return, the root not counted.
        max_step_rows: most provisional draft rows it may write in a round.
    """

    name: str
    max_depth: int
    max_nodes: int
    max_step_rows: int

    def draft(self, drafter: Drafter, state: DraftState, seed: DraftSeed) -> Tree:
        """Draft one tree per sequence. Provisional draft rows are left to the caller to discard."""

    def settings(self) -> dict[str, Any]:
        """What to write beside a result so that it can be repeated."""


def last_rows(rows_BNd: Tensor, counts: Sequence[int]) -> Tensor:
    """[B, N, d] -> [B, 1, d]: each sequence's row number counts[b] - 1."""
    N = rows_BNd.shape[1]
    if all(count == N for count in counts):
        return rows_BNd[:, -1:]
    last_B = torch.tensor(counts, device=rows_BNd.device) - 1
    return rows_BNd.gather(1, last_B[:, None, None].expand(-1, 1, rows_BNd.shape[-1]))
