"""python experiments/three_variants/run.py

Train EAGLE, HASS and EAGLE-3 on the bundled target under one budget of wall time each, evaluate all on the same
held-out prompts, and write results/ (metrics, training logs) and docs/figures/. A variant with results is skipped.
"""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURE = HERE.parents[1] / "docs" / "figures" / "training.svg"
# optimizer steps that fit the budget, from timing 40 steps of each alone on the machine
STEPS = json.loads((HERE / "steps.json").read_text())


def eaglelab(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "eaglelab.cli.main", *arguments], check=True)


def study(variant: str, steps: int) -> None:
    target = RESULTS / f"{variant}.json"
    if target.exists():
        return
    run = Path("outputs") / "three_variants" / variant
    if not (run / "metrics.json").exists():
        interval = f"trainer.val_check_interval={max(steps // 10, 1)}"
        eaglelab("train", f"variant={variant}", f"trainer.max_steps={steps}", interval, f"hydra.run.dir={run}")
    for tree, limit in (("static", 20), ("chain", 40)):
        eaglelab("evaluate", f"run={run}", f"tree={tree}", f"limit={limit}")
    (log,) = run.glob("csv/version_0/metrics.csv")
    RESULTS.mkdir(exist_ok=True)
    shutil.copy(log, RESULTS / f"{variant}_log.csv")
    figures = json.loads((run / "metrics.json").read_text())
    chain, static = (
        json.loads(next(run.glob(f"evaluations/{tree}-*.json")).read_text()) for tree in ("chain", "static")
    )
    static.pop("per_prompt")
    for result in (chain, static):
        result["settings"]["data"] = "bundled eval"  # a path of one machine otherwise
    chain["per_prompt"] = [
        {k: turn[k] for k in ("id", "new_tokens", "stop_reason", "accepted")} for turn in chain["per_prompt"]
    ]
    target.write_text(json.dumps({"training": figures["training"], "chain": chain, "static": static}, indent=1) + "\n")


def series(log: Path, column: str) -> tuple[list[float], list[float]]:
    with log.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(column)]
    return [int(row["step"]) + 1 for row in rows], [float(row[column]) for row in rows]


def draw() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for variant in STEPS:
        log = RESULTS / f"{variant}_log.csv"
        seconds = json.loads((RESULTS / f"{variant}.json").read_text())["training"]["seconds"]
        for axes, column in ((left, "train/loss"), (right, "val/tau")):
            steps, values = series(log, column)
            axes.plot([s / STEPS[variant] * seconds for s in steps], values, label=variant, linewidth=1.3)
    left.set(xlabel="seconds of training", ylabel="training loss (objectives differ)", yscale="log")
    right.set(xlabel="seconds of training", ylabel="simulated tau, chain of 5")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE)


def report() -> None:
    print(
        "| variant | steps | supervised rows | seconds | simulated tau | tau, chain of 5 | 95 % interval | speed-up |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for variant in STEPS:
        result = json.loads((RESULTS / f"{variant}.json").read_text())
        training, chain = result["training"], result["chain"]
        low, high = chain["tau_interval"]
        simulated = training["final"]["val/tau"]
        print(
            f"| {variant} | {training['optimizer_steps']} | {training['supervised_rows']:,} "
            f"| {training['seconds']:.0f} | {simulated:.2f} | {chain['tau']:.2f} | {low:.2f} to {high:.2f} "
            f"| {chain['speedup']:.2f}x |"
        )


if __name__ == "__main__":
    for variant, steps in STEPS.items():
        study(variant, steps)
    draw()
    report()
