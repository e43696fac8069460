"""The committed state of a generation, and the one way to change it.

Letters: B batch, N new target rows, R flat rows, F tapped feature width, d hidden.

Invariant between rounds, for tokens x_0..x_n of a sequence: the target's K/V holds rows 0..n-1; the
drafter's K/V plus `pending` hold the target-derived draft rows 0..n-1, each once and nothing else;
x_n, the frontier, is published and its K/V and feature are still to be appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglelab.decoding.protocol import DraftState

if TYPE_CHECKING:
    from eaglelab.target import KVSlots, Tap


@dataclass(frozen=True)
class Publication:
    """What one request takes from a decision.

    tokens: the tokens to publish; the last becomes the frontier.
    accepted: how many of them are draft tokens.
    stop_reason: set when this ends the request.

    As many target rows are committed as tokens are published: the root's, and those of all
    published tokens but the last.
    """

    tokens: list[int]
    accepted: int
    stop_reason: str | None


@dataclass
class Request:
    """One sequence's host side: its tokens and when to stop.

    tokens: prompt and published tokens.
    max_tokens: most tokens, prompt included; `limit_reason` names what sets that limit.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    limit_reason: str
    stop_ids: frozenset[int]
    stop_reason: str | None = None

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def admit_first(self, root: int) -> None:
        """Publish the token that the prefill chose."""
        publication = self.admit([root])
        self.tokens.extend(publication.tokens)
        self.stop_reason = publication.stop_reason

    def admit(self, candidates: list[int]) -> Publication:
        """Cut accepted tokens + frontier at the first end token and at the length limit."""
        room = self.max_tokens - len(self.tokens)
        kept, reason = candidates[:room], None
        if len(kept) == room:
            reason = self.limit_reason
        for place, token in enumerate(kept):
            if token in self.stop_ids:
                kept, reason = kept[: place + 1], "eos"
                break
        return Publication(kept, min(len(kept), len(candidates) - 1), reason)


@dataclass(frozen=True)
class DraftRows:
    """Target-derived rows for the drafter: row t has the feature of x_t and the token x_{t+1}."""

    features_BNF: Tensor
    tokens_BN: Tensor
    position_BN: Tensor
    counts: list[int]


@dataclass
class DecodeState:
    """Everything that is committed. Only `Transaction.commit` and `Engine` assign to it.

    frontier_B1: the published token whose target row is still to be appended.
    length_B1: committed target rows, which is the frontier's position.
    pending: draft rows not yet given to the drafter.
    seed_B1d: the drafter's output at its last row; valid while nothing is pending.
    draft: the drafter's K/V, None when nothing will be drafted any more.
    """

    requests: list[Request]
    cache: KVSlots
    capacity: int
    frontier_B1: Tensor
    length_B1: Tensor
    draft: DraftState | None = None
    pending: DraftRows | None = None
    seed_B1d: Tensor | None = None
    prefill_s: float = 0.0

    @property
    def length(self) -> int:
        """Committed rows of the longest sequence."""
        return max(len(request.tokens) for request in self.requests) - 1


def stack_features(features: dict[Tap, Tensor], taps: Sequence[Tap]) -> Tensor:
    """The drafter's taps side by side, in its order: [B, N, F]."""
    chosen = [features[tap] for tap in taps]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)
