"""The tables of a comparison's report."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglelab.report.comparison import Comparison, Training
from eaglelab.report.tables import NONE, Column, Entry, Table, between, file_name, number, percent


def summary_table(comparison: Comparison, suite: str | None = None) -> Table:
    """One line per tree, temperature, batch and drafter; of one suite, or of all of them together."""
    what = suite or (comparison.suites[0] if len(comparison.suites) == 1 else "All tasks together")
    table = Table(
        file_name("summary", suite) if suite else "summary",
        f"{what}: training seeds pooled; 95 % bootstrap intervals over prompts and training seeds. Costs: time of a "
        "round in steps of plain decoding. First token: share of rounds that accepted at least one.",
        [
            Column("tree", number=False),
            Column("T"),
            Column("batch"),
            Column("drafter", number=False),
            Column("tau", "tokens per round"),
            Column("speed-up", "over plain decoding"),
            Column("first token", "accepted"),
            Column("draft cost", "c"),
            Column("verify cost"),
            Column("calib. error"),
            Column("identical", "answers"),
        ],
    )
    grid = itertools.product(comparison.trees, comparison.temperatures, comparison.batches)
    for tree, temperature, batch in grid:
        start = True
        for name in comparison.names:
            labels: dict[str, Any] = {"name": name, "tree": tree, "temperature": temperature, "batch": batch}
            labels |= {"suite": suite} if suite else {}
            pool = comparison.pool(**labels)
            if not pool.cells:
                continue
            same, of = pool.identical
            table.add(
                [
                    tree if start else "",
                    f"{temperature:g}" if start else "",
                    str(batch) if start else "",
                    Entry(name, drafter=name),
                    Entry(number(pool.tau), between(comparison.interval("tau", **labels))),
                    Entry(number(pool.speedup, unit="x"), between(comparison.interval("speedup", **labels))),
                    percent(pool.levels[0].cumulative if pool.levels else None),
                    number(pool.cost("draft")),
                    number(pool.cost("verify")),
                    number(pool.expected_error, 3),
                    f"{same} of {of}" + ("" if pool.same_text_expected else " *"),
                ],
                start=start,
            )
            start = False
    return table


def contrast_table(comparison: Comparison) -> Table:
    """Paired differences between drafters, as the results hold them."""
    table = Table(
        "contrasts",
        "Paired differences: the same prompts, resampled together. p by swapping the two drafters prompt by prompt, "
        "corrected by Holm within each measure, task and batch. A difference is shown where the interval leaves out 0 "
        "and the corrected p is at most 0.05.",
        [
            Column("measure", number=False),
            Column("task", number=False),
            Column("tree", number=False),
            Column("T"),
            Column("batch"),
            Column("difference of", number=False),
            Column("difference"),
            Column("95 % interval"),
            Column("p", "Holm"),
            Column("verdict", number=False),
        ],
    )
    before = None
    for row in _informative(comparison.results.get("contrasts", [])):
        place = tuple(row[key] for key in ("measure", "suite", "tree", "temperature", "batch"))
        table.add(
            [
                {"speedup": "speed-up"}.get(row["measure"], row["measure"]),
                row["suite"],
                row["tree"],
                f"{row['temperature']:g}",
                str(row["batch"]),
                f"{row['one']} \N{MINUS SIGN} {row['other']}",
                number(row["difference"], sign=True),
                between((row["difference_low"], row["difference_high"]), sign=True) or NONE,
                number(row["p_holm"], 3),
                Entry(row["verdict"], verdict=row["verdict"].split()[0]),
            ],
            start=place != before,
        )
        before = place
    return table


def _informative(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """tau once where another batch gave the very same answers."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for row in sorted(rows, key=lambda row: row["measure"] != "tau"):
        key = tuple(row[key] for key in ("measure", "suite", "tree", "temperature", "one", "other", "difference"))
        if row["measure"] != "tau" or key not in seen:
            kept.append(row)
        seen.add(key)
    return kept


def cost_table(comparison: Comparison) -> Table:
    """What each training took, and its simulated tau beside that of real decoding."""
    table = Table(
        "cost",
        "Trainings. Simulated tau: a chain on held-out conversations, at the last validation; real tau: greedy chain "
        "decoding.",
        [
            Column("drafter", number=False),
            Column("seed"),
            Column("steps"),
            Column("supervised rows"),
            Column("time", "s"),
            Column("compute", "PFLOP"),
            Column("parameters", "million"),
            Column("peak memory", "MiB"),
            Column("store", "MiB"),
            Column("simulated tau"),
            Column("real tau", "chain, T = 0"),
        ],
    )
    known = {(run["name"], run["seed"]): run for run in comparison.results.get("runs", ())}
    before = None
    for training in comparison.trainings:
        figures, run = training.figures, known.get((training.name, training.seed), {})
        memory = run.get("peak_memory_mib") or (training.metrics.get("comparison") or {}).get("peak_memory_mib")
        parameters = figures.get("drafter_parameters")
        flops, store = run.get("flops"), store_bytes(training)
        table.add(
            [
                Entry(training.name, drafter=training.name),
                str(training.seed),
                number(figures.get("optimizer_steps"), 0),
                number(figures.get("supervised_rows"), 0),
                number(figures.get("seconds"), 0),
                number(None if flops is None else flops / 1e15, 3),
                number(None if parameters is None else parameters / 1e6, 2),
                number(memory, 0),
                number(None if store is None else store / 2**20, 0),
                number(training.simulated_tau),
                number(run.get("real_chain_tau")),
            ],
            start=training.name != before,
        )
        before = training.name
    table.drop_unknown()
    return table


def store_bytes(training: Training) -> int | None:
    """Size of the feature store that the training read, where it still is; None where the target ran in training."""
    features = training.figures.get("features") or {}
    if features.get("source") != "store" or not Path(features["path"]).is_dir():
        return None
    return sum(path.stat().st_size for path in Path(features["path"]).rglob("*") if path.is_file())


def contract_table(comparison: Comparison) -> Table:
    """Manifests side by side, one line per field; what differs is marked."""
    first = {training.name: training for training in reversed(comparison.trainings)}
    fields: dict[str, dict[str, str]] = {}
    for name, training in first.items():
        for key, value in flat(training.manifest):
            fields.setdefault(key, {})[name] = _shown(value)
    columns = [Column("field", number=False), *(Column(name, number=False) for name in comparison.names)]
    table = Table("manifests", "Manifest of each drafter's first training seed; marked: fields that differ.", columns)
    for key, values in fields.items():
        line = [values.get(name, NONE) for name in comparison.names]
        differs = len(set(line)) > 1
        table.add([Entry(key, code=True), *(Entry(value, code=True, differs=differs) for value in line)])
    return table


def diff_table(comparison: Comparison) -> Table | None:
    """What separates the runs besides their names; None where the results say nothing about it."""
    found = comparison.results.get("diff")
    if found is None:
        return None
    table = Table(
        "differences",
        "Differences of the runs' manifests, data, recipes, budgets and versions. Everything else in them is the same.",
        [Column(title, number=False) for title in ("section", "field", *comparison.names)],
    )
    before = None
    for row in found:
        start = row["section"] != before
        values = [Entry(_of_drafter(name, row["values"]), code=True) for name in comparison.names]
        table.add([row["section"] if start else "", Entry(row["field"], code=True), *values], start=start)
        before = row["section"]
    return table


def _of_drafter(name: str, values: Mapping[str, Any]) -> str:
    """A drafter's value, or those of its training seeds, which stand under `NAME-seedK`."""
    if name in values:
        return _shown(values[name])
    seeds = {
        label.removeprefix(f"{name}-"): value for label, value in values.items() if label.startswith(f"{name}-seed")
    }
    if len(set(map(_shown, seeds.values()))) == 1:
        return _shown(next(iter(seeds.values())))
    return "\n".join(f"{seed}: {_shown(value)}" for seed, value in seeds.items()) or NONE


def flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Dotted names of a nested object's leaves, in order."""
    if isinstance(value, Mapping) and value:
        return [pair for key, inner in value.items() for pair in flat(inner, f"{name}.{key}" if name else str(key))]
    return [(name, value)]


def _shown(value: Any) -> str:
    if isinstance(value, str):
        digest = len(value) >= 40 and all(c in "0123456789abcdef" for c in value)
        return value[:12] if digest else value
    return json.dumps(value)
