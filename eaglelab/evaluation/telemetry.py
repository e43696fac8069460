"""Records of single rounds: written while decoding, read back, summed up.

One record is one sequence in one round, a flat dict with the fields of `FIELDS`; others are kept as they come. Times
are in seconds and are the sequence's share of the round (round time / sequences in the batch), so that shares add up
to wall time. What a serving loop should show: article, section 0x0C.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eaglelab.evaluation.calibration import Calibration, by_depth
from eaglelab.evaluation.report import WIDTH

Record = Mapping[str, Any]

PHASES = ("draft", "pack", "verify", "commit")

# Any value may be None.
FIELDS: dict[str, Any] = {
    "request": int,
    "round": int,
    "batch": int,  # sequences that shared the round
    "expanded": int,  # draft nodes that were looked at
    "drafted": int,  # draft nodes that were retained
    "verified": int,  # rows of the target's forward pass, the root included
    "accepted": int,  # draft tokens accepted and published
    "reached": int,  # level of the deepest accepted node, published or not
    "published": int,  # tokens added to the output
    "stop_reason": str,
    **{f"{phase}_s": float for phase in PHASES},
    "target_kv_bytes": int,  # rows that the round wrote for its tree, whether kept or not
    "draft_kv_bytes": int,
    "depth": list[int],  # of each drafted node; 1: a child of the root
    "confidence": list[float],  # exp(log value) of each drafted node's path
    "node_accepted": list[bool],
    "experts_union": list[int],  # per mixture layer: experts touched by all rows of the sequence
    "experts_root": list[int],  # by the root row alone
}

# --- writing --------------------------------------------------------------------------------------


class Sink(ABC):
    """Takes records until it is closed; a context manager."""

    @abstractmethod
    def write(self, record: Record) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Finish the file. Closing twice is harmless."""

    def abandon(self) -> None:
        """Called instead of `close` when an exception ends the `with` block."""
        self.close()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def open_sink(path: str | Path, *, group: int = 1024) -> Sink:
    """A sink for `path.jsonl` or `path.parquet`; replaces an older file.

    JSON Lines: every record is on its way to the disk when `write` returns, and a killed run leaves all of them.
    Parquet: small and typed; row groups of `group` records go to `path.parquet.partial`, which takes its final name
    when it is closed. After an exception it keeps the partial name and can be read; a killed process leaves nothing
    that Parquet readers take.

    Raises:
        ValueError: another suffix; from `write` and `close` (Parquet): a value that does not fit its
            column; its group of records is lost then.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: records are written as .jsonl or .parquet; choose one of the two")
    path.parent.mkdir(parents=True, exist_ok=True)
    return JsonlSink(path) if path.suffix == ".jsonl" else ParquetSink(path, group)


class JsonlSink(Sink):
    """One JSON object per line, flushed line by line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(dict(record)) + "\n")

    def close(self) -> None:
        self._file.close()


class ParquetSink(Sink):
    """Row groups of one schema: `FIELDS`, then whatever else the first group of records holds."""

    def __init__(self, path: Path, group: int = 1024) -> None:
        self._path, self._partial = path, partial_name(path)
        self._group = group
        self._waiting: list[Record] = []
        self._writer: Any = None
        self._closed = False
        self._partial.unlink(missing_ok=True)

    def write(self, record: Record) -> None:
        assert not self._closed, "the sink is closed"
        if self._writer is not None:
            new = [name for name in record if name not in self._writer.schema.names]
            if new:
                raise ValueError(
                    f"{self._path}: field {new[0]!r} comes too late, after the columns were fixed: give every record "
                    "the same fields (None where there is no value), or write .jsonl"
                )
        self._waiting.append(record)
        if len(self._waiting) >= self._group:
            self._flush()

    def close(self) -> None:
        if not self._closed:
            self._finish()
            os.replace(self._partial, self._path)

    def abandon(self) -> None:
        if not self._closed:
            self._finish()

    def _finish(self) -> None:
        self._closed = True
        try:
            if self._waiting or self._writer is None:
                self._flush()
        finally:
            if self._writer is not None:
                self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        records, self._waiting = self._waiting, []
        schema = _schema(records) if self._writer is None else self._writer.schema
        columns = []
        for column in schema:
            try:
                columns.append(pa.array([record.get(column.name) for record in records], column.type))
            except (pa.ArrowException, TypeError, OverflowError) as error:
                raise ValueError(f"{self._path}: field {column.name!r} is to hold {column.type}: {error}") from error
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial, schema, compression="zstd")
        self._writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _schema(records: Sequence[Record]) -> Any:
    import pyarrow as pa

    kinds: dict[Any, Any] = {
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
        list[int]: pa.list_(pa.int64()),
        list[float]: pa.list_(pa.float64()),
        list[bool]: pa.list_(pa.bool_()),
    }
    schema = pa.schema([(name, kinds[kind]) for name, kind in FIELDS.items()])
    others = list(dict.fromkeys(name for record in records for name in record if name not in FIELDS))
    for name in others:
        try:
            kind = pa.infer_type([record.get(name) for record in records])
        except pa.ArrowException as error:
            raise ValueError(f"field {name!r} is no Parquet column: {error}; write .jsonl") from error
        schema = schema.append(pa.field(name, kind))
    return schema


def partial_name(path: Path) -> Path:
    """Where a Parquet file grows before it is finished."""
    return path.with_name(f"{path.name}.partial")


# --- reading --------------------------------------------------------------------------------------


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a finished or partial file, one by one.

    A last line that was cut off is left out (JSON Lines). Parquet fills the `FIELDS` that a record lacked with None.

    Raises:
        ValueError: another suffix, no such file, or (here or while reading) a file that is damaged.
    """
    path = Path(path)
    kind = path.with_suffix("").suffix if path.suffix == ".partial" else path.suffix
    if kind not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: records are read from .jsonl and .parquet; name a file of one of the two")
    if not path.is_file():
        partial = partial_name(path)
        hint = f"; an unfinished one is {partial}" if partial.is_file() else ""
        raise ValueError(f"{path}: no such file{hint}")
    return _read_jsonl(path) if kind == ".jsonl" else _read_parquet(path)


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}, line {number}: no JSON record ({error}); remove the line") from error
            yield record


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path}: no readable Parquet file ({error}). Its process was killed before the end of the file was "
            "written; write .jsonl where that may happen"
        ) from error
    with file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


# --- summing up -----------------------------------------------------------------------------------


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


# --- showing --------------------------------------------------------------------------------------


def log_to_wandb(summary: Mapping[str, Any], run: Any, prefix: str = "decode") -> dict[str, float]:
    """Log the summary's numbers to a W&B run (or anything with `log(dict)`), as scalars.

    Names are paths: `decode/tau`, `decode/by_depth/depth_1/conditional`, `decode/batches/batch_4/tokens_per_s`.

    Returns:
        What was logged; values that are None are not.
    """
    scalars = dict(_scalars(prefix, summary))
    run.log(scalars)
    return scalars


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _scalars(f"{name}/{key}", inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            if isinstance(inner, Mapping):  # its first entry says which one it is
                (label, number), *rest = inner.items()
                yield from _scalars(f"{name}/{label}_{number}", dict(rest))
            else:
                yield from _scalars(f"{name}/{place}", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def telemetry_table(summary: Mapping[str, Any], title: str = "rounds") -> str:
    """Lay out `summarize_rounds` for reading, 80 columns wide."""
    lines = [title[:WIDTH], "-" * WIDTH]
    lines += [f"{label:<11}{value:>13}   {note}".rstrip()[:WIDTH] for label, value, note in _totals(summary)]
    if summary["by_depth"]:
        lines += ["", "acceptance by depth: of all rounds; of rounds that came so far; of nodes"]
        lines += [f"{'depth':>5}{'all':>9}{'next':>9}{'rounds':>9}{'nodes':>10}{'confidence':>13}{'accepted':>11}"]
        lines += [
            f"{row['depth']:>5}{_share(row['cumulative']):>9}{_share(row['conditional']):>9}{row['rounds']:>9}"
            f"{row['nodes']:>10}{_share(row['confidence']):>13}{_share(row['acceptance']):>11}"
            for row in summary["by_depth"]
        ]
    if summary["calibration"]["nodes"]:
        lines += ["", "draft confidence against observed acceptance, with 95 % intervals"]
        lines += [f"{'confidence':<14}{'nodes':>9}{'mean':>9}{'accepted':>11}{'interval':>18}"]
        lines += [_bin(row) for row in summary["calibration"]["reliability"] if row["nodes"]]
    if summary["experts"]:
        lines += ["", f"{'mixture layer':<14}{'root':>9}{'union':>9}   experts per round"]
        lines += [f"{row['layer']:<14}{row['root']:>9.2f}{row['union']:>9.2f}" for row in summary["experts"]["layers"]]
    if summary["batches"]:
        lines += [
            "",
            f"{'batch':>5}{'rounds':>9}{'tau':>7}{'tokens/s':>11}{'round':>12}{'p95':>12}{'request':>12}{'p95':>12}",
        ]
        lines += [_batch_line(row) for row in summary["batches"]]
    return "\n".join(lines)


def _totals(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    nodes, time, table, kv = (summary[key] for key in ("nodes", "time", "calibration", "kv_bytes"))
    ends = ", ".join(f"{reason} {count}" for reason, count in summary["stops"].items())
    split = [f"{phase} {_share(share, 0)}" for phase, share in time["split"].items() if share is not None]
    amount = f"{summary['tokens']} tokens in {summary['rounds']} rounds of {summary['requests']} requests"
    rows = [
        ("tau", _number(summary["tau"]), "accepted draft tokens + 1, all rounds pooled"),
        ("rounds", str(summary["rounds"]), amount),
        ("", "", f"ended by {ends}" if ends else ""),
        ("nodes", _number(nodes["retained"], 1), "drafted and retained per round"),
        ("", _number(nodes["expanded"], 1), "expanded"),
        ("", _number(nodes["verified"], 1), "rows verified, the root included"),
        ("time", f"{time['total_s']:.2f} s", ", ".join(split)),
        ("ECE", _number(table["expected_error"], 4), f"confidence against acceptance, {table['nodes']} nodes"),
        ("Brier", _number(table["brier"], 4), "mean of (confidence - accepted) squared"),
        ("K/V", _bytes(kv["target"]["mean"]), f"temporary target rows, at most {_bytes(kv['target']['max'])}"),
        ("", _bytes(kv["draft"]["mean"]), f"temporary draft rows, at most {_bytes(kv['draft']['max'])}"),
    ]
    if experts := summary["experts"]:
        note = f"per mixture layer; root row alone {experts['root']:.2f}, ratio {_number(experts['ratio'])}"
        rows.append(("experts", _number(experts["union"]), note))
    return [row for row in rows if any(row)]


def _bin(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    name, interval = f"{row['low']:.2f} to {row['high']:.2f}", f"{low:.1%} to {high:.1%}"
    return f"{name:<14}{row['nodes']:>9}{_share(row['confidence']):>9}{_share(row['acceptance']):>11}{interval:>18}"


def _batch_line(row: Mapping[str, Any]) -> str:
    times = []
    for key in ("round_s", "request_s"):
        spread = row[key] or {}
        times += [_milliseconds(spread.get("median")), _milliseconds(spread.get("p95"))]
    rate = _number(row["tokens_per_s"], 1)
    return f"{row['batch']:>5}{row['rounds']:>9}{_number(row['tau']):>7}{rate:>11}" + "".join(f"{t:>12}" for t in times)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.1f} ms"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
