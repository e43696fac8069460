"""python experiments/scaling/run.py

How tau grows with training, for EAGLE-1, HASS and EAGLE-3 on the bundled target: the recipes' steps halved five times,
three seeds each, every point a training of its own with its whole schedule. Writes results/<fraction>.json, the tables
of README.md and docs/figures/scaling.svg. What is finished is not done again; `--report` only prints and draws.

--runs DIR    keeps the comparisons there, one folder per fraction (default outputs/scaling)
--only 8 4    these fractions of the budget only (32 is 1/32)
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURE = HERE.parents[1] / "docs" / "figures" / "scaling.svg"
STEPS = {"eagle": 1240, "hass": 1910, "eagle3": 720}
"""The recipes' optimizer steps: 180 s of two quiet cores for each of the three."""
SECONDS = 180
FRACTIONS = (32, 16, 8, 4, 2, 1)
SEEDS = (0, 1, 2)
KEPT = (
    *("name", "variant", "seed", "tau", "tau_low", "tau_high", "tau_ended", "acceptance_conditional"),
    *("identical", "answers", "rounds", "new_tokens"),
    *("train_steps", "train_supervised_rows", "train_flops", "train_simulated_tau"),
)
"""Columns of a cell; times are left out, because other jobs ran beside."""


def study(fraction: int, runs: Path) -> None:
    out, target = runs / f"fraction-{fraction}", RESULTS / f"{fraction}.json"
    if target.exists():
        return
    steps = ", ".join(f"{name}: {round(total / fraction)}" for name, total in STEPS.items())
    subprocess.run(
        [
            *(sys.executable, "-m", "eaglelab.cli.main", "compare", f"out={out}"),
            *("budget.unit=steps", f"budget.value={{{steps}}}", f"seeds={list(SEEDS)}"),
            *("suites=['${eaglelab.bundled_data:eval}']", "limit=100", "max_new_tokens=256"),
            *("trees=[chain]", "temperatures=[0]", "batches=[20]"),
        ],
        check=True,
    )
    results = json.loads((out / "results.json").read_text())
    rows = [{key: row[key] for key in KEPT} for row in results["rows"]]
    target.parent.mkdir(exist_ok=True)
    kept = {"rows": rows, "summary": results["summary"], "contrasts": results["contrasts"]}
    target.write_text(json.dumps(kept, indent=1) + "\n")


def load() -> list[tuple[int, dict]]:
    """(fraction, results) of what is recorded, the smallest budget first."""
    files = [(fraction, RESULTS / f"{fraction}.json") for fraction in FRACTIONS]
    return [(fraction, json.loads(file.read_text())) for fraction, file in files if file.exists()]


def curve(name: str) -> dict[str, np.ndarray]:
    """A variant's points: seconds, supervised rows, and tau over all seeds with its interval."""
    points = []
    for fraction, results in load():
        (one,) = [summary for summary in results["summary"] if summary["name"] == name]
        rows = np.mean([row["train_supervised_rows"] for row in results["rows"] if row["name"] == name])
        points.append((SECONDS / fraction, rows, one["tau"], one["tau_low"], one["tau_high"]))
    return dict(zip(("seconds", "rows", "tau", "low", "high"), np.array(points).T))


def at_rows(name: str, rows: float) -> float:
    """tau after so many supervised rows, linear in their logarithm between two points; NaN outside of them."""
    points = curve(name)
    return float(np.interp(np.log(rows), np.log(points["rows"]), points["tau"], left=np.nan, right=np.nan))


def report() -> None:
    print("| seconds | variant | steps | supervised rows | tau | 95 % interval | tau by seed |")
    print("|---|---|---|---|---|---|---|")
    for fraction, results in load():
        for one in results["summary"]:
            rows = [row for row in results["rows"] if row["name"] == one["name"]]
            by_seed = ", ".join(f"{tau:.2f}" for tau in one["tau_by_seed"])
            print(
                f"| {SECONDS / fraction:.0f} | {one['name']} | {rows[0]['train_steps']:,} "
                f"| {np.mean([row['train_supervised_rows'] for row in rows]):,.0f} | {one['tau']:.2f} "
                f"| {one['tau_low']:.2f} to {one['tau_high']:.2f} | {by_seed} |"
            )
    print("\n| seconds | difference of tau | | 95 % interval | p (Holm) | |\n|---|---|---|---|---|---|")
    for fraction, results in load():
        for one in results["contrasts"]:
            if one["measure"] == "tau":
                print(
                    f"| {SECONDS / fraction:.0f} | {one['one']} - {one['other']} | {one['difference']:+.2f} "
                    f"| {one['difference_low']:+.2f} to {one['difference_high']:+.2f} "
                    f"| {one['p_holm']:.4f} | {one['verdict']} |"
                )
    print("\n| supervised rows | eagle | hass | eagle3 |\n|---|---|---|---|")
    for rows in (25_000, 50_000, 100_000, 200_000, 400_000, 550_000):
        shown = [f"{tau:.2f}" if np.isfinite(tau := at_rows(name, rows)) else "" for name in STEPS]
        print(f"| {rows:,} | {' | '.join(shown)} |")
    rows = [row for _, results in load() for row in results["rows"]]
    gap = np.array([row["train_simulated_tau"] - row["tau"] for row in rows])
    same, answers = sum(row["identical"] for row in rows), sum(row["answers"] for row in rows)
    print(f"\nsimulated tau - tau, {len(rows)} trainings: mean {gap.mean():+.2f}, {gap.min():+.2f} to {gap.max():+.2f}")
    print(f"{same:,} of {answers:,} answers equal plain decoding, id for id.")


def draw() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    for color, name in enumerate(STEPS):
        points = curve(name)
        for axes, axis in ((left, "rows"), (right, "seconds")):
            axes.plot(points[axis], points["tau"], "o-", color=f"C{color}", markersize=3, linewidth=1.3, label=name)
            axes.fill_between(points[axis], points["low"], points["high"], color=f"C{color}", alpha=0.15, linewidth=0)
    left.set(xlabel="supervised rows in training", ylabel="tau, chain of 5")
    right.set(xlabel="seconds of training on two quiet cores")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("outputs/scaling"))
    parser.add_argument("--only", type=int, nargs="*", default=FRACTIONS)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    for fraction in () if arguments.report else arguments.only:
        study(fraction, arguments.runs)
    report()
    draw()
