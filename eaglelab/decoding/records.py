"""What a round and a generation report. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from eaglelab.decoding.nodes import NodeRecord
from eaglelab.stopwatch import Stopwatch


@dataclass(frozen=True)
class RoundRecord:
    """One sequence in one round.

    request: number of the prompt.
    round: number of the round in its batch; batch: sequences in it.
    expanded: nodes that the drafter looked at; drafted: nodes kept in the tree; 0 in a plain round.
    verified: rows of the target forward, the root included.
    accepted: draft tokens that were accepted *and published*. A round that ends the generation in
        the middle of its accepted path (end token, length limit) counts what was published.
    reached: level of the deepest accepted node, published or not.
    published: tokens added to the output: `accepted + 1`, or `accepted` when the last published
        token was itself a draft token.
    published_tokens: these tokens.
    stop_reason: why the generation ended here, or None.
    target_kv_bytes, draft_kv_bytes: keys and values that were written provisionally in this round.
    nodes: the tree, where it was asked for.

    Times are this sequence's share: the round's divided by its batch.
    """

    request: int
    round: int
    batch: int
    expanded: int
    drafted: int
    verified: int
    accepted: int
    reached: int
    published: int
    published_tokens: list[int]
    stop_reason: str | None
    target_kv_bytes: int
    draft_kv_bytes: int
    watch: Stopwatch = field(repr=False, compare=False)
    nodes: NodeRecord | None = None

    @property
    def draft_s(self) -> float:
        """Feeding the drafter the last accepted rows, and drafting the tree."""
        return self.watch.between(0, 1) / self.batch

    @property
    def pack_s(self) -> float:
        """Flattening the tree: rows, positions, and the target's additive mask."""
        return self.watch.between(1, 2) / self.batch

    @property
    def verify_s(self) -> float:
        """The target's forward from rows and mask on, acceptance, and the wait for its result."""
        return self.watch.between(2, 3) / self.batch

    @property
    def commit_s(self) -> float:
        return self.watch.between(3, 4) / self.batch

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-ready, times in seconds; see `eaglelab.evaluation.telemetry`."""
        names = [f.name for f in fields(self) if f.name not in ("watch", "nodes")]
        return {
            **{name: getattr(self, name) for name in names},
            "draft_s": self.draft_s,
            "pack_s": self.pack_s,
            "verify_s": self.verify_s,
            "commit_s": self.commit_s,
            **(self.nodes.to_dict() if self.nodes else {}),
        }


@dataclass(frozen=True)
class GenerationResult:
    """One finished generation.

    tokens: the new tokens, the end token included when there is one. The first comes from the
        prefill, the others from rounds.
    stop_reason: "eos", "length" (max_new_tokens) or "context" (no position or slot left).
    prefill_s: the prompt's target forward, and its drafter forward when a drafter is used; a share where several
        prompts were prefilled together.
    decode_s: its share of all its rounds.
    """

    tokens: list[int]
    prompt_length: int
    rounds: list[RoundRecord]
    stop_reason: str
    prefill_s: float
    decode_s: float

    @property
    def accepted(self) -> list[int]:
        return [record.accepted for record in self.rounds]

    @property
    def tau(self) -> float:
        """Acceptance length: accepted draft tokens per round, plus one; nan without a round."""
        return 1 + sum(self.accepted) / len(self.rounds) if self.rounds else float("nan")
