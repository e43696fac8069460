"""What a comparison writes at its end: trainings, cells, contrasts, differences and notes in one document."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglelab.comparison.budget import Spent
from eaglelab.comparison.cells import Run
from eaglelab.comparison.diff import differences, merged_seeds, run_configuration
from eaglelab.comparison.plan import Plan
from eaglelab.comparison.record import Record
from eaglelab.comparison.results import cell_row, contrasts, summary_rows


def put_together(
    plan: Plan, record: Record, runs: Sequence[Run], figures: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of ``results.json``."""
    trained = {(run.name, run.seed): training_figures(plan, run, record.spent.get(run.name), figures) for run in runs}
    rows = [
        cell_row(one, trained[one["cell"]["name"], one["cell"]["seed"]], resamples=plan.resamples) for one in figures
    ]
    labels = {f"{run.name}-seed{run.seed}": run for run in runs}
    found = differences({label: run.folder.path for label, run in labels.items()})
    found = merged_seeds(found, {label: run.name for label, run in labels.items()})
    summary = summary_rows(figures, resamples=plan.resamples)
    return {
        "runs": list(trained.values()),
        "rows": rows,
        "summary": summary,
        "contrasts": contrasts(figures, resamples=plan.resamples),
        "diff": [one.to_dict() for one in found],
        "notes": notes(plan, runs, rows),
    }


def training_figures(plan: Plan, run: Run, spent: Spent | None, figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run cost, and its simulated tau beside the tau of real chain decoding."""
    metrics = run.folder.read_metrics()
    training, here = metrics.get("training") or {}, metrics.get("comparison") or {}
    depth = _chain_depth(run)
    flops = None if spent is None or spent.flops is None else spent.flops * training.get("optimizer_steps", 0)
    return {
        "name": run.name,
        "variant": run.manifest.variant,
        "seed": run.seed,
        "folder": str(run.folder.path),
        "steps": training.get("optimizer_steps"),
        "supervised_rows": training.get("supervised_rows"),
        "seconds": training.get("seconds"),
        "flops": flops,
        "parameters": training.get("drafter_parameters"),
        "peak_memory_mib": here.get("peak_memory_mib"),
        "store_bytes": _store_bytes(training.get("features") or {}),
        "draft_vocab_size": training.get("draft_vocab_size"),
        "answer_token_coverage": training.get("answer_token_coverage"),
        "simulated_tau": (training.get("final") or {}).get("val/tau"),
        "chain_depth": depth,
        "real_chain_tau": _real_chain_tau(run, depth, figures),
    }


def _store_bytes(features: Mapping[str, Any]) -> int | None:
    """Size of the feature store that a training read; None without one, or where it is gone."""
    path = Path(features["path"]) if features.get("source") == "store" else None
    return sum(file.stat().st_size for file in path.rglob("*")) if path and path.is_dir() else None


def _chain_depth(run: Run) -> int | None:
    return run_configuration(run.folder).get("variant", {}).get("chain_depth")


def _real_chain_tau(run: Run, depth: int | None, figures: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the first suite that was decoded greedily with the chain that the simulation assumes."""
    for one in figures:
        cell = one["cell"]
        greedy_chain = cell["tree_settings"].get("name") == "chain" and cell["temperature"] == 0
        if (cell["name"], cell["seed"]) == (run.name, run.seed) and greedy_chain:
            return one["tau"] if depth in (None, cell["tree_settings"].get("depth")) else None
    return None


def notes(plan: Plan, runs: Sequence[Run], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader of the numbers must know."""
    found = []
    single = [name for name in plan.names if sum(run.name == name for run in runs) == 1]
    if single:
        found.append(
            f"one training seed of {', '.join(single)}: its contrasts are about this training, not about the method"
        )
    if plan.recipes and plan.budget.unit == "seconds":
        found.append("steps come from a timed calibration on this machine; budget.unit=steps repeats them elsewhere")
    for suite in dict.fromkeys(row["suite"] for row in rows):
        skipped = max(row["skipped"] for row in rows if row["suite"] == suite)
        if skipped:
            found.append(f"{suite}: {skipped} questions are longer than the target's context and were skipped")
    wrong = [row for row in rows if row["same_text_expected"] and row["identical"] < row["answers"]]
    for row in wrong:
        differ = row["answers"] - row["identical"]
        found.append(
            f"{row['name']}, seed {row['seed']}, {row['suite']}, {row['tree']}, T {row['temperature']:g}, batch "
            f"{row['batch']}: {differ} of {row['answers']} answers differ from plain decoding"
        )
    return found


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One row per cell; the old file stays whole until the new one is."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dict(row) for row in rows])
    for place, column in enumerate(table.schema):
        if pa.types.is_null(column.type):  # nothing known in any cell: a number that is missing
            empty = table.column(place).cast(pa.float64())
            table = table.set_column(place, column.name, empty)
    aside = path.with_name(f"{path.name}.tmp")
    pq.write_table(table, aside, compression="zstd")
    os.replace(aside, path)
