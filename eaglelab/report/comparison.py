"""Reading the folder of a comparison: what was asked, its cells, its trainings, its results."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eaglelab.report.pooling import Pool

LABELS = ("name", "seed", "suite", "tree", "temperature", "batch")


@dataclass(frozen=True)
class Point:
    """A validation during training. rows: supervised so far; seconds: of training so far."""

    step: int
    tau: float
    rows: float | None
    seconds: float | None


@dataclass(frozen=True)
class Training:
    """A run folder that took part.

    name, seed: in the comparison.
    exact_seconds: the logs hold the seconds of every validation; else they are the run's, divided by steps.
    """

    name: str
    seed: int
    manifest: dict[str, Any]
    metrics: dict[str, Any]
    curve: list[Point] = field(default_factory=list)
    exact_seconds: bool = False

    @classmethod
    def read(cls, name: str, seed: int, folder: Path) -> Training:
        """What is there of `manifest.json`, `metrics.json` and the CSV log."""
        metrics = _json(folder / "metrics.json")
        lines = [line for path in sorted(folder.glob("csv/version_*/metrics.csv")) for line in _lines(path)]
        exact = any(line.get("train/seconds") for line in lines)
        curve = _curve(lines, metrics.get("training") or {})
        return cls(name, seed, _json(folder / "manifest.json"), metrics, curve, exact)

    @property
    def figures(self) -> dict[str, Any]:
        """The training's own figures; empty for an imported drafter."""
        return self.metrics.get("training") or {}

    @property
    def simulated_tau(self) -> float | None:
        """At the last validation."""
        return self.curve[-1].tau if self.curve else (self.figures.get("final") or {}).get("val/tau")


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _curve(lines: Iterable[dict[str, str]], figures: dict[str, Any]) -> list[Point]:
    """Validations in the order of steps, each with the rows and the seconds that were logged before it.

    Between two logged lines rows are taken to grow evenly with steps, as seconds are where the log has none.
    """
    rows_at: list[tuple[int, float]] = []
    seconds_at: dict[int, float] = {}
    taus: dict[int, float] = {}
    for line in lines:
        step = int(float(line["step"])) + 1
        if line.get("train/supervised_rows"):
            rows_at.append((step, float(line["train/supervised_rows"])))
        if line.get("train/seconds"):
            seconds_at[step] = float(line["train/seconds"])
        if line.get("val/tau"):
            taus[step] = float(line["val/tau"])
    total = figures.get("optimizer_steps"), figures.get("seconds")
    curve = []
    for step, tau in sorted(taus.items()):
        seconds = _between(sorted(seconds_at.items()), step) if seconds_at else None
        if seconds is None and total[0] and total[1]:
            seconds = total[1] * step / total[0]
        curve.append(Point(step, tau, _between(sorted(rows_at), step), seconds))
    return curve


def _between(known: list[tuple[int, float]], step: int) -> float | None:
    """Linear interpolation from (0, 0) over the known points, straight on behind the last."""
    if not known:
        return None
    before = (0, 0.0)
    for after in known:
        if after[0] >= step:
            break
        before = after
    else:
        return before[1] * step / before[0]
    share = (step - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])


class Comparison:
    """A folder that `eaglelab compare` wrote.

    Raises:
        ValueError: it holds no comparison, or one without a measured cell, or a damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "comparison.json").is_file():
            what = "holds no comparison.json" if folder.is_dir() else "does not exist"
            raise ValueError(f"compare={folder} {what}; give the folder that `eaglelab compare` wrote (its out=DIR)")
        self.asked = _json(folder / "comparison.json")
        self.results = _json(folder / "results.json")
        self._intervals: dict[tuple[Any, ...], tuple[float, float] | None] = {}
        self.cells = self._cells()
        if not self.cells:
            raise ValueError(f"{folder} has no measured cell yet; run the same `eaglelab compare` again to go on")

    def _cells(self) -> list[dict[str, Any]]:
        """Contents of the `cell.json` files behind the results, in the order of their rows; all where there are no
        results yet. A folder may hold cells of earlier plans too."""
        found = []
        for path in sorted(self.folder.glob("cells/*/cell.json")):
            found.append(_json(path) | {"folder": path.parent})
        order = {_identity(row): place for place, row in enumerate(self.results.get("rows", ()))}
        if not order:
            return found
        chosen = [cell for cell in found if _identity_of(cell) in order]
        return sorted(chosen, key=lambda cell: order[_identity_of(cell)])

    @cached_property
    def names(self) -> list[str]:
        """Of the drafters, in the order in which they were asked for."""
        asked = [*self.asked.get("variants", ()), *self.asked.get("given", ())]
        return self._values("name", asked)

    @cached_property
    def suites(self) -> list[str]:
        return self._values("suite", [])

    @cached_property
    def trees(self) -> list[str]:
        return self._values("tree", list(self.asked.get("trees") or ()))

    @cached_property
    def temperatures(self) -> list[float]:
        return sorted(self._values("temperature", []))

    @cached_property
    def batches(self) -> list[int]:
        return sorted(self._values("batch", []))

    @cached_property
    def seeds(self) -> list[int]:
        return sorted(self._values("seed", []))

    def _values(self, label: str, asked: list[Any]) -> list[Any]:
        there = list(dict.fromkeys(cell["cell"][label] for cell in self.cells))
        return [value for value in asked if value in there] + [value for value in there if value not in asked]

    def pool(self, **labels: Any) -> Pool:
        """All cells with these labels together; it may be empty."""
        return Pool([cell for cell in self.cells if all(cell["cell"][key] == value for key, value in labels.items())])

    def interval(self, measure: str, **labels: Any) -> tuple[float, float] | None:
        """95 % bootstrap interval of all cells with these labels (which leave nothing but suite and seed open), over
        prompts and training seeds; None where it has no value.

        The results' own interval where they hold this very pool, else drawn in the same way.
        """
        rows = [row for row in self.results.get("summary", ()) if all(row[key] == labels[key] for key in labels)]
        if len(rows) == 1 and "seed" not in labels:
            ends = rows[0][f"{measure}_low"], rows[0][f"{measure}_high"]
            return None if None in ends else ends
        key = (measure, *sorted(labels.items()))
        if key not in self._intervals:
            self._intervals[key] = self._drawn_interval(measure, labels)
        return self._intervals[key]

    def _drawn_interval(self, measure: str, labels: dict[str, Any]) -> tuple[float, float] | None:
        from eaglelab.comparison.results import MEASURES, table_of
        from eaglelab.comparison.statistics import bootstrap, interval

        (how,) = (one for one in MEASURES if one.name == measure)
        by_suite: dict[str, list[dict[str, Any]]] = {}
        for cell in self.pool(**labels).cells:
            by_suite.setdefault(cell["cell"]["suite"], []).append(cell)
        table = np.concatenate([table_of(cells, how) for cells in by_suite.values()], axis=1)
        resamples = self.asked.get("resamples", 10_000)
        ends = interval(bootstrap([table], how.statistic, resamples=resamples)[:, 0])
        return None if ends is None else (ends[0], ends[1])

    @cached_property
    def trainings(self) -> list[Training]:
        """The runs of the cells, by name and seed."""
        found: dict[tuple[str, int], Path] = {}
        for cell in self.cells:
            labels = cell["cell"]
            name, seed = labels["name"], labels["seed"]
            own = self.folder / "runs" / f"{name}-seed{seed}"
            found.setdefault((name, seed), own if own.is_dir() else Path(labels.get("run") or own))
        order = sorted(found, key=lambda one: (self.names.index(one[0]), one[1]))
        return [Training.read(name, seed, found[name, seed]) for name, seed in order]


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Two measurements of a cell, or of cells of the same labels, never take the same time."""
    return (*(row[key] for key in LABELS), row["decode_s"], row["baseline_decode_s"])


def _identity_of(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    seconds = cell["seconds"]
    return _identity(cell["cell"] | {"decode_s": seconds["decode"], "baseline_decode_s": seconds["baseline_decode"]})


def _json(path: Path) -> dict[str, Any]:
    """A file's object, empty where there is no file.

    Raises:
        ValueError: damaged.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); run the same `eaglelab compare` again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no object; run the same `eaglelab compare` again")
    return content
