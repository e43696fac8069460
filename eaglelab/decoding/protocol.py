"""What decoding asks of a drafter and of a tree policy; it never asks which variant they are.

Letters: B batch, N rows, W frontier nodes, P provisional rows, F tapped feature width, d hidden,
Vd draft vocabulary.

Conventions. The committed tokens are x_0..x_n. The last of them, the frontier, is published but not
yet forwarded: target K/V and features exist for 0..n-1. Draft row t reads the feature of x_t and the
token x_{t+1}, so draft rows 0..n-1 exist as well, and the output of row n-1 predicts the children of
the tree's root x_n. A node at level l >= 1 has target position n + l and draft position n - 1 + l.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from eaglelab.ops import on_device

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

    def new_state(self, batch: int, capacity: int, room: int | None = None) -> DraftState:
        """Empty draft K/V for `batch` sequences of up to `capacity` rows, tree rows included.

        `room` is the most sequences that will be there at once (None: `batch`). The state tells the memory of one
        row as `row_bytes`.
        """

    def join(self, state: DraftState, other: DraftState) -> None:
        """Append the sequences of `other`, kept rows only, to those of `state`."""

    def select(self, state: DraftState, order: Sequence[int]) -> None:
        """Keep the sequences `order`, in that order; each moves towards the front or stays."""

    def extend(
        self,
        state: DraftState,
        features_BNF: Tensor,
        tokens_BN: Tensor,
        position_BN: Tensor,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Add target-derived rows, whose K/V is kept, and return their outputs [B, N, d].

        Only the first `counts[b]` rows of sequence b are real (all of them when None, none when 0). All rows
        are added or none: a call that raises leaves the kept rows as they were.
        """

    def truncate(self, state: DraftState, lengths: Sequence[int]) -> None:
        """Keep at most the first `lengths[b]` target-derived rows of sequence b."""

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
    noise: shape -> uniform draws in [0, 1) of shape [B, *shape], each sequence from its own stream; for policies that
        sample their nodes, None for the others.
    warp: draft log-probabilities [B, W, Vd] at temperature 1 -> those of the distribution to sample from, by each
        sequence's own settings; comes with `noise`.
    """

    hidden_B1d: Tensor
    position_B1: Tensor
    noise: Callable[[tuple[int, ...]], Tensor] | None = None
    warp: Callable[[Tensor], Tensor] | None = None

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
        samples: whether its nodes are drawn at random, so that the seed must bring `noise` and `warp` and its trees
            carry their `Proposals`.
        asks_host: whether the host waits for the device while a tree is drafted, so that it cannot be recorded.
    """

    name: str
    max_depth: int
    max_nodes: int
    max_step_rows: int
    samples: bool

    @property
    def asks_host(self) -> bool: ...

    def draft(self, drafter: Drafter, state: DraftState, seed: DraftSeed) -> Tree:
        """Draft one tree per sequence. Provisional draft rows are left to the caller to discard."""

    def settings(self) -> dict[str, Any]:
        """What to write beside a result so that it can be repeated."""


def last_rows(rows_BNd: Tensor, counts: Sequence[int], otherwise_B1d: Tensor | None = None) -> Tensor:
    """[B, N, d] -> [B, 1, d]: each sequence's row number counts[b] - 1, or `otherwise_B1d` where that is none."""
    N = rows_BNd.shape[1]
    if all(count == N for count in counts):
        return rows_BNd[:, -1:]
    counts_B11 = on_device(counts, rows_BNd.device)[:, None, None]
    index_B1d = (counts_B11 - 1).clamp(min=0).expand(-1, 1, rows_BNd.shape[-1])
    last_B1d = rows_BNd.gather(1, index_B1d)
    return last_B1d if otherwise_B1d is None else torch.where(counts_B11 > 0, last_B1d, otherwise_B1d)
