"""What one verification publishes and discards: all of it, or nothing.

Letters: B batch, R flat rows, A committed rows, F tapped feature width.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from eaglelab.decoding.protocol import Drafter
from eaglelab.decoding.state import DecodeState, DraftRows, Publication, stack_features
from eaglelab.decoding.verify import Decision, HostDecision
from eaglelab.ops import on_device

if TYPE_CHECKING:
    from eaglelab.target.frozen import RowsOutput


@dataclass(frozen=True)
class Prepared:
    """A commit that cannot fail any more: what the state becomes once the K/V lengths have moved."""

    lengths: list[int]
    pending: DraftRows | None
    frontier_B1: Tensor
    length_B1: Tensor
    tokens: list[list[int]]
    stop_reasons: list[str | None]

    def apply(self, state: DecodeState) -> None:
        """Assign; doing it twice is doing it once."""
        state.pending, state.frontier_B1, state.length_B1 = self.pending, self.frontier_B1, self.length_B1
        for request, tokens, stop_reason in zip(state.requests, self.tokens, self.stop_reasons, strict=True):
            request.tokens, request.stop_reason = tokens, stop_reason


class Transaction:
    """One round over a `DecodeState`.

    Used as a context manager around the round. Target rows and draft rows written inside are
    provisional; `commit` publishes the accepted ones and everything else is dropped on leaving,
    after an exception too. The K/V lengths are the commit mark: an interrupt before they have moved leaves the
    state of before the round, one after they have moved is followed by the rest of the commit.
    Source: contracts, section 6; article, 0x05D.
    """

    def __init__(self, state: DecodeState, drafter: Drafter | None) -> None:
        self.state = state
        self.drafter = drafter
        self._prepared: Prepared | None = None

    def __enter__(self) -> Self:
        self._drop_provisional()  # an interrupt may have struck while the last round was leaving
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._prepared is not None and self.state.cache.lengths == self._prepared.lengths:
            self._prepared.apply(self.state)
        self._drop_provisional()

    def _drop_provisional(self) -> None:
        self.state.cache.discard()
        if self.drafter is not None and self.state.draft is not None:
            self.drafter.discard(self.state.draft)

    def commit(self, decision: Decision, host: HostDecision, verified: RowsOutput) -> list[Publication]:
        """Publish tokens, target K/V and target features by the decision's flat rows.

        The last published token of each sequence becomes its frontier. Whatever can fail is done
        before the committed state is touched; the K/V commit moves its lengths last.
        """
        state = self.state
        publications = [
            request.admit(candidates) for request, candidates in zip(state.requests, host.published, strict=True)
        ]
        counts = [len(publication.tokens) for publication in publications]
        A = max(counts)
        rows_BA = decision.rows_BL[:, :A]
        tokens_BA = decision.published_BL[:, :A]
        pending = None
        drafting = [request.drafting for request in state.requests]
        if state.draft is not None and self.drafter is not None and any(drafting):
            assert state.pending is None, "draft rows would be skipped"
            features_BRF = stack_features(verified.features, self.drafter.taps)
            pending = DraftRows(
                _gather_rows(features_BRF, rows_BA),
                tokens_BA,
                state.length_B1 + torch.arange(A, device=rows_BA.device),
                [count if drafts else 0 for count, drafts in zip(counts, drafting, strict=True)],
                list(state.cache.lengths),
            )
        frontier_B1, length_B1 = _advance(state.length_B1, tokens_BA, counts)
        self._prepared = Prepared(
            lengths=[length + count for length, count in zip(state.cache.lengths, counts, strict=True)],
            pending=pending,
            frontier_B1=frontier_B1,
            length_B1=length_B1,
            tokens=[r.tokens + p.tokens for r, p in zip(state.requests, publications, strict=True)],
            stop_reasons=[publication.stop_reason for publication in publications],
        )
        rows = [line[:kept] for line, kept in zip(host.rows, counts, strict=True)]
        state.cache.commit(rows, counts)
        self._prepared.apply(state)
        return publications


def _gather_rows(values_BRF: Tensor, rows_BA: Tensor) -> Tensor:
    return values_BRF.gather(1, rows_BA[..., None].expand(-1, -1, values_BRF.shape[-1]))


def _advance(length_B1: Tensor, tokens_BA: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """The last of each sequence's `counts[b]` tokens, and the new lengths."""
    A = tokens_BA.shape[1]
    if all(count == A for count in counts):
        return tokens_BA[:, -1:], length_B1 + A
    counts_B1 = on_device(counts, length_B1.device)[:, None]
    return tokens_BA.gather(1, counts_B1 - 1), length_B1 + counts_B1
