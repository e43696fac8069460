"""python experiments/three_variants/run.py

Train EAGLE, HASS and EAGLE-3 on the bundled target under one compute budget, decode the same held-out prompts with all
of them, and write results/, the tables of README.md and docs/figures/. What has a result already is skipped;
`--report` only prints and draws.

--runs DIR keeps the run folders there (default outputs/three_variants).
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURE = HERE.parents[1] / "docs" / "figures" / "training.svg"
# optimizer steps that fit the budget by the time of one step, measured alone on the machine
PLAN = json.loads((HERE / "plan.json").read_text())
COLUMNS = ("step", "train/supervised_rows", "val/tau", "val/hit@1", "val/hit@5")


def eaglelab(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "eaglelab.cli.main", *arguments], check=True)


def study(name: str, seed: int, runs: Path) -> None:
    target = RESULTS / f"{name}-{seed}.json"
    if target.exists():
        return
    plan, run = PLAN["runs"][name], runs / f"{name}-{seed}"
    if not (run / "metrics.json").exists():
        interval = f"trainer.val_check_interval={plan['steps'] // 10}"
        steps = f"trainer.max_steps={plan['steps']}"
        overrides = [one.format(runs=runs, seed=seed) for one in plan["overrides"]]
        eaglelab("train", *overrides, steps, interval, f"seed={seed}", f"hydra.run.dir={run}")
    if not list(run.glob("evaluations/chain-*.json")):
        eaglelab("evaluate", f"run={run}", "tree=chain", f"limit={PLAN['prompts']}", "batch=20")
    chain = json.loads(max(run.glob("evaluations/chain-*.json")).read_text())
    (log,) = run.glob("csv/version_0/metrics.csv")
    RESULTS.mkdir(exist_ok=True)
    target.write_text(
        json.dumps(
            {
                "training": json.loads((run / "metrics.json").read_text())["training"],
                "curve": curve(log),
                "identical": chain["identical"],
                "versions": chain["versions"],
                "answers": [
                    {k: turn[k] for k in ("id", "new_tokens", "stop_reason", "accepted")}
                    for turn in chain["per_prompt"]
                ],
            }
        )
        + "\n"
    )


def curve(log: Path) -> list[dict[str, float]]:
    """Validation points with the supervised rows trained on by then."""
    points, rows = [], 0.0
    with log.open(newline="") as file:
        for line in csv.DictReader(file):
            rows = float(line["train/supervised_rows"] or rows)
            if line["val/tau"]:
                points.append({**{k: float(line[k]) for k in COLUMNS if line[k]}, "train/supervised_rows": rows})
    return points


def load(name: str) -> list[dict]:
    files = [RESULTS / f"{name}-{seed}.json" for seed in PLAN["runs"][name]["seeds"]]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def counts(results: list[dict]) -> np.ndarray:
    """[seeds, prompts, 2]: accepted draft tokens and rounds of each answer."""
    return np.array([[[sum(a["accepted"]), len(a["accepted"])] for a in one["answers"]] for one in results])


def pooled(table: np.ndarray) -> float:
    accepted, rounds = table.reshape(-1, 2).sum(0)
    return 1 + accepted / rounds


def bootstrap(*tables: np.ndarray, resamples: int = 10_000) -> np.ndarray:
    """[resamples, tables] tau; prompts are resampled together, seeds of each table on their own."""
    random = np.random.default_rng(0)
    prompts = tables[0].shape[1]
    drawn = np.empty((resamples, len(tables)))
    for place in range(resamples):
        chosen = random.integers(prompts, size=prompts)
        for column, table in enumerate(tables):
            seeds = random.integers(len(table), size=len(table))
            drawn[place, column] = pooled(table[seeds][:, chosen])
    return drawn


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def report() -> None:
    print("| variant | steps | supervised rows | seconds | simulated tau | tau | 95 % interval | tau by seed |")
    print("|---|---|---|---|---|---|---|---|")
    tables = {}
    for name in PLAN["runs"]:
        results = load(name)
        if not results:
            continue
        tables[name] = counts(results)
        low, high = interval(bootstrap(tables[name])[:, 0])
        training = [one["training"] for one in results]
        simulated = np.mean([t["final"]["val/tau"] for t in training])
        print(
            f"| {name} | {training[0]['optimizer_steps']:,} | {training[0]['supervised_rows']:,} "
            f"| {np.mean([t['seconds'] for t in training]):.0f} | {simulated:.2f} | {pooled(tables[name]):.2f} "
            f"| {low:.2f} to {high:.2f} | {', '.join(f'{pooled(t):.2f}' for t in tables[name])} |"
        )
    print("\n| difference of tau | | 95 % interval | |\n|---|---|---|---|")
    for second, first in PLAN["differences"]:
        if not {first, second} <= set(tables):
            continue
        drawn = bootstrap(tables[second], tables[first])
        low, high = interval(drawn[:, 0] - drawn[:, 1])
        verdict = "no difference shown" if low <= 0 <= high else "differs"
        difference = pooled(tables[second]) - pooled(tables[first])
        print(f"| {second} - {first} | {difference:+.2f} | {low:+.2f} to {high:+.2f} | {verdict} |")
    same = [one["identical"] for name in PLAN["runs"] for one in load(name)]
    print(f"\n{sum(s['count'] for s in same)} of {sum(s['of'] for s in same)} answers equal plain decoding, id for id.")


def draw() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    for color, name in enumerate(("eagle", "hass", "eagle3", "eagle3_3_steps")):
        for number, one in enumerate(load(name)):
            tau = [point["val/tau"] for point in one["curve"]]
            rows = [point["train/supervised_rows"] / 1000 for point in one["curve"]]
            share = [PLAN["seconds"] * (point["step"] + 1) / PLAN["runs"][name]["steps"] for point in one["curve"]]
            style = {"color": f"C{color}", "linewidth": 1.3, "label": None if number else name}
            left.plot(share, tau, **style)
            right.plot(rows, tau, **style)
    left.set(xlabel="seconds of two quiet cores", ylabel="simulated tau, chain of 5")
    right.set(xlabel="thousand supervised rows")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("outputs/three_variants"))
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    for name in PLAN["runs"]:
        for seed in () if arguments.report else PLAN["runs"][name]["seeds"]:
            study(name, seed, arguments.runs)
    report()
    draw()
