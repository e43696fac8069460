"""Figures of several cells together: sums over their rounds, nodes and seconds, then ratios of the sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eaglelab.evaluation.calibration import wilson

PHASES = ("draft", "pack", "verify", "commit", "other")


@dataclass(frozen=True)
class Level:
    """A level of the tree, 1 being the root's children.

    cumulative: share of all rounds with at least so many tokens accepted.
    conditional: share of rounds that accepted this level, of those that came to it; with its Wilson interval. None
        where no round came to it.
    """

    depth: int
    cumulative: float
    conditional: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Bin:
    """Nodes of similar confidence, and how many of them were accepted, with the Wilson interval."""

    nodes: int
    confidence: float
    acceptance: float
    interval: tuple[float, float]


class Pool:
    """What some cells did together.

    Args:
        cells: contents of their `cell.json`.
    """

    def __init__(self, cells: Sequence[dict[str, Any]]) -> None:
        self.cells = list(cells)

    @cached_property
    def rounds(self) -> int:
        return sum(cell["rounds"] for cell in self.cells)

    @cached_property
    def tau(self) -> float | None:
        """Accepted draft tokens per round + 1; None without rounds."""
        accepted = sum(sum(cell["accepted_by_depth_rounds"]) for cell in self.cells)
        return 1 + accepted / self.rounds if self.rounds else None

    @cached_property
    def speedup(self) -> float | None:
        """Ratio of the two rates; None where a side decoded nothing."""
        with_drafter, without = self._rate("speculative"), self._rate("baseline")
        return with_drafter / without if with_drafter and without else None

    def _rate(self, side: str) -> float | None:
        timings = [turn[side] for cell in self.cells for turn in cell["per_prompt"]]
        tokens, seconds = (sum(timing[key] for timing in timings) for key in ("round_tokens", "decode_s"))
        return tokens / seconds if tokens else None

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of one token of plain decoding."""
        rate = self._rate("baseline")
        return 1000 / rate if rate else None

    @cached_property
    def phases_ms(self) -> dict[str, float] | None:
        """Milliseconds of a round, by what they went into; with a batch a sequence's share of them."""
        if not self.rounds:
            return None
        parts: dict[str, float] = defaultdict(float)
        for cell in self.cells:
            for phase, share in (cell["time_split"] or {}).items():
                parts[phase] += 1000 * share * cell["seconds"]["decode"] / self.rounds
        return {phase: parts[phase] for phase in PHASES}

    def cost(self, phase: str) -> float | None:
        """Time of a round's phase in units of a plain step of the target; `draft` is the papers' c."""
        plain, phases = self.plain_ms, self.phases_ms
        return phases[phase] / plain if plain and phases else None

    @property
    def same_text_expected(self) -> bool:
        """Whether answers should be those of plain decoding; a sampled tree keeps their law alone."""
        return all(cell["settings"]["same_text_expected"] for cell in self.cells)

    @property
    def identical(self) -> tuple[int, int]:
        """Answers equal to plain decoding, of all."""
        same, of = (sum(cell["identical"][key] for cell in self.cells) for key in ("count", "of"))
        return same, of

    @cached_property
    def levels(self) -> list[Level]:
        """By depth; from telemetry where there is some, else cumulative shares alone."""
        at_least, open_, reached = defaultdict(float), defaultdict(int), defaultdict(int)  # type: ignore[var-annotated]
        for cell in self.cells:
            for depth, count in enumerate(cell["accepted_by_depth_rounds"], start=1):
                at_least[depth] += count
            for row in self._telemetry(cell).get("by_depth", ()):
                at_least.setdefault(row["depth"], 0)
                open_[row["depth"]] += row["rounds"]
                reached[row["depth"]] += row["reached"]
        return [
            Level(
                depth,
                count / self.rounds,
                reached[depth] / open_[depth] if open_[depth] else None,
                _wilson(reached[depth], open_[depth]) if open_[depth] else None,
            )
            for depth, count in sorted(at_least.items())
        ]

    @cached_property
    def bins(self) -> list[Bin]:
        """The reliability table's bins that hold nodes."""
        sums: dict[int, list[float]] = defaultdict(lambda: [0, 0.0, 0])
        for cell in self.cells:
            for row in self._telemetry(cell).get("calibration", {}).get("reliability", ()):
                if row["nodes"]:
                    one = sums[row["bin"]]
                    one[0] += row["nodes"]
                    one[1] += row["nodes"] * row["confidence"]
                    one[2] += round(row["nodes"] * row["acceptance"])
        return [
            Bin(int(nodes), confidence / nodes, accepted / nodes, _wilson(accepted, nodes))
            for _, (nodes, confidence, accepted) in sorted(sums.items())
        ]

    @property
    def expected_error(self) -> float | None:
        """Calibration error: |acceptance - confidence| per bin, averaged over nodes; None without nodes."""
        nodes = sum(one.nodes for one in self.bins)
        return sum(one.nodes * abs(one.acceptance - one.confidence) for one in self.bins) / nodes if nodes else None

    @staticmethod
    def _telemetry(cell: dict[str, Any]) -> dict[str, Any]:
        return cell.get("telemetry") or {}

    def turns(self) -> Iterator[dict[str, Any]]:
        for cell in self.cells:
            yield from cell["per_prompt"]


def _wilson(successes: float, trials: float) -> tuple[float, float]:
    low, high = wilson([successes], [trials])
    return float(low[0]), float(high[0])
