"""What a reduced draft vocabulary costs: target tokens that the drafter could not have proposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eaglelab.drafters import SlotDrafter


@dataclass
class VocabularyMisses:
    """Counts the target's tokens at the first rejected position, and those outside the draft vocabulary.

    A round is counted where its accepted path ended at a row with drafted children, all of which were rejected, and
    the target's own choice there was published. Where the path ended at a leaf nothing was rejected.

    outside: target ids that cannot be drafted; None: every token can.
    """

    outside: frozenset[int] | None
    rejected: int = 0
    misses: int = 0

    @classmethod
    def of(cls, drafter: SlotDrafter) -> VocabularyMisses:
        ids_K: Tensor | None = getattr(drafter.network, "ids_K", None)
        if ids_K is None:
            return cls(None)
        return cls(frozenset(range(drafter.network.config.vocab_size)) - frozenset(ids_K.tolist()))

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in the telemetry record of a round, with its nodes."""
        if not record["node_parent"] or record["published"] <= record["accepted"]:
            return
        rows = [row for row, accepted in enumerate(record["node_accepted"], start=1) if accepted]
        if max(rows, default=0) not in record["node_parent"]:
            return
        self.rejected += 1
        self.misses += self.outside is not None and record["published_tokens"][-1] in self.outside

    def to_dict(self) -> dict[str, Any]:
        """`share` is None where nothing was rejected, or where every token can be drafted."""
        counted = self.outside is not None and self.rejected > 0
        return {
            "reduced": self.outside is not None,
            "rejected": self.rejected,
            "misses": self.misses,
            "share": self.misses / self.rejected if counted else None,
        }
