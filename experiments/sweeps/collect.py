"""python experiments/sweeps/collect.py outputs/sweeps/noise/2026-11-30_12-00-00

The table of a sweep that Hydra or a W&B agent ran: one line per point, its seeds together, best first. Of a single
run's folder: its evaluations, fastest first (sweep=tree). --csv FILE writes one line per run or evaluation.
"""

import argparse
import csv
import json
import sys
from collections import defaultdict
from pathlib import Path

import yaml

from eaglelab.training import RunFolder

MEASURED = ("val/tau", "tau", "steps", "rows", "seconds")
"""Simulated tau, tau of the run's latest evaluation if it has one, optimizer steps, supervised rows, wall time."""
SAYS_NOTHING = ("hydra.", "logger=", "sweep=")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a sweep, or of one run")
    parser.add_argument("--csv", type=Path, help="write every run here")
    arguments = parser.parse_args()
    try:
        single = (arguments.folder / "manifest.json").is_file()
        rows = evaluations(arguments.folder) if single else trainings(arguments.folder)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    print(table(rows if single else pooled(rows)))


def trainings(folder: Path) -> list[dict]:
    """The varied overrides and the figures of every finished run below ``folder``; others are named on stderr.

    Raises:
        ValueError: no finished run.
    """
    runs = []
    for manifest in sorted(folder.rglob("manifest.json")):
        run = RunFolder(manifest.parent)
        metrics = run.read_metrics()
        training = metrics.get("training", {"interrupted": True})
        if training["interrupted"]:
            print(f"left out, not finished: {run.path}", file=sys.stderr)
            continue
        tau = training["final"].get("val/tau")
        rest = (training["optimizer_steps"], training["supervised_rows"], training["seconds"])
        runs.append(overrides(run) | dict(zip(MEASURED, (tau, metrics.get("tau"), *rest), strict=True)))
    if not runs:
        raise ValueError(f"no finished training in {folder}; give the folder that `python train.py -m` wrote to")
    names = dict.fromkeys(name for run in runs for name in run if name not in MEASURED)
    varied = [name for name in names if len({run.get(name) for run in runs}) > 1]
    return [{name: run.get(name) for name in (*varied, *MEASURED)} for run in runs]


def overrides(run: RunFolder) -> dict[str, str]:
    """What the run was told on its command line, as written there."""
    given = yaml.safe_load((run.path / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    return dict(one.lstrip("+").split("=", 1) for one in given if not one.startswith(SAYS_NOTHING))


def pooled(runs: list[dict]) -> list[dict]:
    """Runs that differ in nothing but the seed as one line of means, with the range of simulated tau."""
    names = [name for name in runs[0] if name not in MEASURED and name != "seed"]
    points = defaultdict(list)
    for run in runs:
        points[tuple(run[name] for name in names)].append(run)
    lines = []
    for point, seeds in points.items():
        line = dict(zip(names, point, strict=True)) | {name: mean(run[name] for run in seeds) for name in MEASURED}
        taus = [run["val/tau"] for run in seeds if run["val/tau"] is not None]
        line["by seed"] = ", ".join(f"{tau:.2f}" for tau in taus)
        lines.append(line)
    return sorted(lines, key=lambda line: -(line["val/tau"] or 0))


def mean(values) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def evaluations(folder: Path) -> list[dict]:
    """Tree, acceptance and speed of every evaluation of a run, the fastest first.

    Raises:
        ValueError: it was never evaluated.
    """
    rows = []
    for path in sorted((folder / "evaluations").glob("*.json")):
        figures = json.loads(path.read_text(encoding="utf-8"))
        settings = figures["settings"]
        shape = {name: settings["tree"].get(name) for name in ("name", "width", "depth", "budget")}
        asked = {"batch": settings["batch"], "T": settings["temperature"], "answers": figures["answers"]}
        speed = {"tokens/s": figures["tokens_per_s"], "speed-up": figures["speedup"]}
        rows.append(shape | asked | {"tau": figures["tau"]} | speed)
    if not rows:
        raise ValueError(f"{folder} has no evaluations; run eaglelab evaluate -m run={folder} sweep=tree")
    return sorted(rows, key=lambda row: -(row["tokens/s"] or 0))


def table(rows: list[dict]) -> str:
    """As Markdown; columns in which nothing stands are left out."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    lines = [names, ["---"] * len(names), *([text(row[name], name) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(value, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if name in ("steps", "rows", "seconds", "tokens/s") else f"{value:.2f}"


if __name__ == "__main__":
    main()
