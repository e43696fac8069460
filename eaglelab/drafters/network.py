"""What every drafter network offers to training, rollouts and decoding.

Letters: B sequences, N rows, F width of the concatenated taps, d hidden width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from eaglelab.drafters.config import DrafterConfig
from eaglelab.drafters.layers import Attend

Head = Callable[[Tensor], Tensor]
"""The target's frozen head, [..., d] -> [..., V]."""


class DraftNetwork(nn.Module, ABC):
    """A network from (state, advanced token) to the next state, over keys that the caller owns.

    Embedding and frozen head are the target's and stay outside: a drafter never owns a copy.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def fuse(self, taps_BNF: Tensor) -> Tensor:
        """Target streams [B, N, F] -> the state [B, N, d] that a target-derived row reads."""

    @abstractmethod
    def forward(
        self,
        state_BNd: Tensor,
        embedding_BNd: Tensor,
        position_BN: Tensor,
        attend: Attend,
        slot_BU: Tensor | None = None,
    ) -> Tensor:
        """The next state of every row, or of those that are asked for.

        Args:
            state_BNd: fused target state of the row, or the output of the row's parent.
            embedding_BNd: embedding of the advanced token ``x_{t+1}``.
            position_BN: int64 rotary positions.
            attend: what the rows see (:mod:`eaglelab.drafters.layers`).
            slot_BU: int64, the rows whose next state is needed; of the others only keys and values are. None: all.

        Returns:
            [B, N, d] or [B, U, d]; both what the head reads and the next state of a rollout.
        """

    @abstractmethod
    def keys(self, state_BNd: Tensor, embedding_BNd: Tensor, position_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Only the keys and values [B, G, N, D] that :meth:`forward` would hand to ``attend``."""

    def head_input(self, state: Tensor) -> Tensor:
        """What the head reads of a state [..., d], and what is compared with the target's final feature."""
        return state

    def logits(self, state: Tensor, target_head: Head) -> Tensor:
        """Predicted states [..., d] -> logits over the draft vocabulary; here the target's own head and vocabulary."""
        return target_head(state)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids; the same here."""
        return draft_ids

    if TYPE_CHECKING:

        def __call__(
            self,
            state_BNd: Tensor,
            embedding_BNd: Tensor,
            position_BN: Tensor,
            attend: Attend,
            slot_BU: Tensor | None = None,
        ) -> Tensor: ...
