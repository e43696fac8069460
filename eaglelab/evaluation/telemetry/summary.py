"""Totals over the records of rounds."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eaglelab.evaluation.calibration import Calibration, by_depth
from eaglelab.evaluation.telemetry.fields import PHASES, Record


def summarize_rounds(records: Iterable[Record], *, decode_s: float | None = None, bins: int = 10) -> dict[str, Any]:
    """Totals over records, in one pass. What no record defines is None (or an empty list).

    tau: 1 + accepted draft tokens / rounds, pooled; as in `eaglelab.evaluation.metrics`.
    by_depth: `cumulative` is the share of all rounds with at least that many tokens accepted and published, so that
        tau = 1 + sum of them. `conditional` is the share of accepted levels among rounds that had accepted the level
        before and whose tree went that deep (`rounds`, `reached`); what was accepted beyond the end of the answer
        counts here. `nodes`, `confidence`, `acceptance`, `expected_error` and `brier` are those of the level's nodes.
    nodes: means per round.
    time: seconds of each phase, and shares of `decode_s`; `other` is what the phases leave of it. Without `decode_s`
        shares of their sum, and `other` is None.
    calibration: see `Calibration.to_dict`.
    experts: means of the union over rows and of the root alone, per mixture layer and over all of them.
    kv_bytes: temporary rows of a round, mean and max over records.
    batches: by batch size; `rounds` counts every sequence's. `round_s` is the duration of a round (share x batch),
        `request_s` that of a request's rounds together, counted for the largest batch it was in; both without prefill.

    Args:
        decode_s: wall time around all the rounds, measured by the caller.
        bins: of the reliability table.

    Raises:
        ValueError: a record without `accepted` or `published`, or with lists of different lengths.
    """
    totals = _Totals(bins)
    for number, record in enumerate(records):
        totals.add(number, record)
    return totals.summary(decode_s)


@dataclass
class _Mean:
    """Mean and maximum of the values that are there."""

    total: float = 0.0
    count: int = 0
    most: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1
            self.most = value if self.most is None else max(self.most, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class _Batch:
    """What rounds of one batch size did."""

    tokens: int = 0
    accepted: int = 0
    share_s: float = 0.0
    round_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class _Request:
    batch: int = 0
    seconds: float = 0.0


class _Totals:
    def __init__(self, bins: int) -> None:
        self.bins = bins
        self.rounds = self.accepted = self.published = 0
        self.nodes: dict[str, _Mean] = defaultdict(_Mean)
        self.phases: dict[str, _Mean] = defaultdict(_Mean)
        self.kv: dict[str, _Mean] = defaultdict(_Mean)
        self.at_least: Counter[int] = Counter()  # depth -> rounds with that many accepted and published
        self.reached: Counter[int] = Counter()
        self.open: Counter[int] = Counter()  # depth -> rounds in which this level could be accepted next
        self.deepest = 0
        self.stops: Counter[str] = Counter()
        self.union: list[_Mean] = []
        self.root: list[_Mean] = []
        self.batches: dict[int, _Batch] = defaultdict(_Batch)
        self.requests: dict[int, _Request] = defaultdict(_Request)
        self.waiting: tuple[list[Any], list[Any], list[Any]] = ([], [], [])  # confidence, accepted, depth
        self.calibration = Calibration.empty(bins)
        self.levels: dict[int, Calibration] = {}  # level 0: nodes of unknown depth

    def add(self, number: int, record: Record) -> None:
        name = f"record {number} (request {record.get('request')}, round {record.get('round')})"
        accepted, published = record.get("accepted"), record.get("published")
        if accepted is None or published is None:
            raise ValueError(f"{name} has no `accepted` or no `published`: these are no records of rounds")
        self.rounds += 1
        self.accepted += accepted
        self.published += published
        for key in ("expanded", "drafted", "verified"):
            self.nodes[key].add(record.get(key))
        for key in ("target", "draft"):
            self.kv[key].add(record.get(f"{key}_kv_bytes"))
        if record.get("stop_reason") is not None:
            self.stops[record["stop_reason"]] += 1
        self._add_depths(record, accepted)
        self._add_nodes(record, name)
        self._add_experts(record, name)
        self._add_times(record, accepted, published)

    def _add_depths(self, record: Record, accepted: int) -> None:
        reached = record.get("reached")
        reached = accepted if reached is None else reached
        tree = max(record["depth"], default=0) if record.get("depth") is not None else None
        if tree is None:  # a tree of unknown depth is taken to go on
            tree = 0 if record.get("drafted") == 0 else reached + 1
            self.deepest = max(self.deepest, reached)
        else:
            self.deepest = max(self.deepest, tree, reached)
        for depth in range(1, accepted + 1):
            self.at_least[depth] += 1
        for depth in range(1, reached + 1):
            self.reached[depth] += 1
        for depth in range(1, min(tree, reached + 1) + 1):
            self.open[depth] += 1

    def _add_nodes(self, record: Record, name: str) -> None:
        confidence, outcome, depth = record.get("confidence"), record.get("node_accepted"), record.get("depth")
        if confidence is None or outcome is None:
            return
        depth = [0] * len(confidence) if depth is None else depth
        if not len(confidence) == len(outcome) == len(depth):
            raise ValueError(
                f"{name}: {len(confidence)} confidences, {len(outcome)} outcomes and {len(depth)} depths; give one of "
                "each per drafted node"
            )
        for waiting, values in zip(self.waiting, (confidence, outcome, depth), strict=True):
            waiting.extend(values)
        if len(self.waiting[0]) > 50_000:
            self._settle()

    def _settle(self) -> None:
        for level, table in by_depth(*self.waiting, bins=self.bins).items():
            self.calibration += table
            self.levels[level] = self.levels.get(level, Calibration.empty(self.bins)) + table
        self.waiting = ([], [], [])

    def _add_experts(self, record: Record, name: str) -> None:
        union, root = record.get("experts_union"), record.get("experts_root")
        if not union and not root:
            return
        if not self.union:
            self.union, self.root = ([_Mean() for _ in union or root or ()] for _ in range(2))
        for means, values in ((self.union, union), (self.root, root)):
            if values is None or len(values) != len(means):
                raise ValueError(
                    f"{name}: experts of {0 if values is None else len(values)} mixture layers, of {len(means)} "
                    "elsewhere: give `experts_union` and `experts_root` of one target together"
                )
            for mean, value in zip(means, values, strict=True):
                mean.add(value)

    def _add_times(self, record: Record, accepted: int, published: int) -> None:
        known = {phase: record.get(f"{phase}_s") for phase in PHASES}
        for phase, seconds in known.items():
            self.phases[phase].add(seconds)
        size = record.get("batch")
        if size is None:
            return
        share = sum(seconds for seconds in known.values() if seconds is not None)
        batch = self.batches[size]
        batch.tokens += published
        batch.accepted += accepted
        batch.share_s += share
        batch.round_s.append(share * size)
        if record.get("request") is not None:
            request = self.requests[record["request"]]
            request.batch = max(request.batch, size)
            request.seconds += share * size

    def summary(self, decode_s: float | None) -> dict[str, Any]:
        self._settle()
        return {
            "tau": 1 + self.accepted / self.rounds if self.rounds else None,
            "rounds": self.rounds,
            "requests": len(self.requests),
            "tokens": self.published,
            "stops": dict(sorted(self.stops.items())),
            "by_depth": [self._depth(depth) for depth in range(1, self.deepest + 1)],
            "nodes": {
                "expanded": self.nodes["expanded"].mean,
                "retained": self.nodes["drafted"].mean,
                "verified": self.nodes["verified"].mean,
            },
            "time": self._time(decode_s),
            "calibration": self.calibration.to_dict(),
            "experts": self._experts(),
            "kv_bytes": {key: {"mean": self.kv[key].mean, "max": self.kv[key].most} for key in ("target", "draft")},
            "batches": [self._batch(size) for size in sorted(self.batches)],
        }

    def _depth(self, depth: int) -> dict[str, Any]:
        table = self.levels.get(depth, Calibration.empty(self.bins))
        rounds, reached = self.open[depth], self.reached[depth]
        return {
            "depth": depth,
            "cumulative": self.at_least[depth] / self.rounds,
            "conditional": reached / rounds if rounds else None,
            "rounds": rounds,
            "reached": reached,
            "nodes": table.nodes,
            "confidence": table.confidence,
            "acceptance": table.acceptance,
            "expected_error": table.expected_error,
            "brier": table.brier,
        }

    def _time(self, decode_s: float | None) -> dict[str, Any]:
        seconds = {phase: self.phases[phase].total if self.phases[phase].count else None for phase in PHASES}
        measured = sum(value for value in seconds.values() if value is not None)
        whole = measured if decode_s is None else decode_s
        seconds["other"] = None if decode_s is None else decode_s - measured
        split = {phase: None if value is None or whole <= 0 else value / whole for phase, value in seconds.items()}
        return {"total_s": whole, "seconds": seconds, "split": split}

    def _experts(self) -> dict[str, Any] | None:
        if not self.union:
            return None
        layers = [
            {"layer": layer, "union": union.mean, "root": root.mean}
            for layer, (union, root) in enumerate(zip(self.union, self.root, strict=True))
        ]
        union, root = (sum(mean.total for mean in means) for means in (self.union, self.root))
        count = sum(mean.count for mean in self.union)
        ratio = union / root if root else None
        return {"union": union / count, "root": root / count, "ratio": ratio, "layers": layers}

    def _batch(self, size: int) -> dict[str, Any]:
        batch = self.batches[size]
        rounds = len(batch.round_s)
        return {
            "batch": size,
            "rounds": rounds,
            "tau": 1 + batch.accepted / rounds,
            "tokens": batch.tokens,
            "tokens_per_s": batch.tokens / batch.share_s if batch.share_s else None,
            "round_s": _spread(batch.round_s),
            "request_s": _spread([r.seconds for r in self.requests.values() if r.batch == size]),
        }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not len(values):
        return None
    middle, high = np.quantile(values, [0.5, 0.95])
    return {"mean": float(np.mean(values)), "median": float(middle), "p95": float(high)}
