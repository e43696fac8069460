"""The committed state of a batch of generations.

Letters: B batch, N new target rows, R flat rows, F tapped feature width, d hidden.

Invariant between rounds, for tokens x_0..x_n of a sequence: the target's K/V holds rows 0..n-1; the
drafter's K/V plus `pending` hold the target-derived draft rows 0..n-1, each once and nothing else
(as long as the sequence drafts); x_n, the frontier, is published and its K/V and feature are still to be appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eaglelab.decoding.protocol import Drafter, DraftState
from eaglelab.decoding.sampling import Sampling, Stream
from eaglelab.ops import on_device
from eaglelab.target import closing_order

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
    """One sequence's host side: its tokens, how it chooses them and when to stop.

    tokens: prompt and published tokens.
    max_tokens: most tokens, prompt included; `limit_reason` names what sets that limit.
    drafting: False once the deepest node could pass the last position or slot.
    number: its place among the prompts.
    """

    tokens: list[int]
    prompt_length: int
    max_tokens: int
    limit_reason: str
    stop_ids: frozenset[int]
    sampling: Sampling = field(default_factory=Sampling)
    number: int = 0
    drafting: bool = True
    stop_reason: str | None = None
    prefill_s: float = 0.0

    def __post_init__(self) -> None:
        self.stream = Stream(self.sampling.seed)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def place(self) -> int:
        """Output place of the next token: how many are published."""
        return len(self.tokens) - self.prompt_length

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

    def publish(self, publication: Publication) -> None:
        self.tokens = self.tokens + publication.tokens
        self.stop_reason = publication.stop_reason


@dataclass(frozen=True)
class DraftRows:
    """Target-derived rows for the drafter: row t has the feature of x_t and the token x_{t+1}.

    counts: real rows per sequence, 0 for none; the rest is padding.
    starts: the first row's t, which is how many rows the drafter has before these.
    """

    features_BNF: Tensor
    tokens_BN: Tensor
    position_BN: Tensor
    counts: list[int]
    starts: list[int]

    def select(self, order: Sequence[int]) -> DraftRows:
        place_B = on_device(order, self.tokens_BN.device)
        position_BN = self.position_BN.expand(len(self.counts), -1)
        return DraftRows(
            self.features_BNF[place_B],
            self.tokens_BN[place_B],
            position_BN[place_B],
            [self.counts[b] for b in order],
            [self.starts[b] for b in order],
        )


@dataclass
class DecodeState:
    """Everything that is committed. Only `Transaction` and `Engine` assign to it.

    frontier_B1: the published token whose target row is still to be appended.
    length_B1: committed target rows, which is the frontier's position.
    pending: draft rows not yet given to the drafter.
    seed_B1d: the drafter's output at its last row; valid where nothing is pending.
    draft: the drafter's K/V; None without a drafter.
    """

    requests: list[Request]
    cache: KVSlots
    capacity: int
    frontier_B1: Tensor
    length_B1: Tensor
    draft: DraftState | None = None
    pending: DraftRows | None = None
    seed_B1d: Tensor | None = None

    @property
    def batch(self) -> int:
        return len(self.requests)

    @property
    def running(self) -> list[bool]:
        return [request.stop_reason is None for request in self.requests]

    @torch.inference_mode()
    def join(self, other: DecodeState, drafter: Drafter | None) -> None:
        """Append the sequences of a state that has nothing pending. There must be room for them."""
        assert other.pending is None
        self.cache.join(other.cache)
        if self.draft is not None and drafter is not None:
            drafter.join(self.draft, other.draft)
            self.seed_B1d = _beside(self.seed_B1d, other.seed_B1d)
            if self.pending is not None:
                rows, more = self.pending, other.batch
                self.pending = DraftRows(
                    _padded(rows.features_BNF, more),
                    _padded(rows.tokens_BN, more),
                    _padded(rows.position_BN.expand(len(rows.counts), -1), more),
                    rows.counts + [0] * more,
                    rows.starts + other.cache.lengths,
                )
        self.frontier_B1 = torch.cat([self.frontier_B1, other.frontier_B1])
        self.length_B1 = torch.cat([self.length_B1, other.length_B1])
        self.requests = self.requests + other.requests

    def retire(self, drafter: Drafter | None) -> list[Request]:
        """Take the stopped requests out and return them; the last sequences move into the places of those.

        When all have stopped the state stays as it is.
        """
        running = self.running
        stopped = [request for request in self.requests if request.stop_reason is not None]
        if stopped and any(running):
            self.select(closing_order(running), drafter)
        return stopped

    @torch.inference_mode()
    def select(self, order: Sequence[int], drafter: Drafter | None) -> None:
        """Keep the sequences `order`, in that order."""
        self.cache.select(order)
        if self.draft is not None and drafter is not None:
            drafter.select(self.draft, order)
        place_B = on_device(order, self.frontier_B1.device)
        self.frontier_B1, self.length_B1 = self.frontier_B1[place_B], self.length_B1[place_B]
        self.seed_B1d = None if self.seed_B1d is None else self.seed_B1d[place_B]
        self.pending = None if self.pending is None else self.pending.select(order)
        self.requests = [self.requests[b] for b in order]


def _beside(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat([first, second])


def _padded(values_BN: Tensor, more: int) -> Tensor:
    """`more` sequences of zeros behind those of `values_BN`."""
    return torch.cat([values_BN, values_BN.new_zeros(more, *values_BN.shape[1:])])


def stack_features(features: dict[Tap, Tensor], taps: Sequence[Tap]) -> Tensor:
    """The drafter's taps side by side, in its order: [B, N, F]."""
    chosen = [features[tap] for tap in taps]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)
