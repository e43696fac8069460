"""python experiments/recipes/search.py experiments/recipes/eagle.yaml

Train one drafter per trial of a YAML list and record simulated tau, time and tokens in a CSV beside it. A trial that
is in the CSV already is skipped, so an interrupted search continues where it stopped.

    - name: lr_3e-3
      overrides: [variant=eagle, optim.lr=3e-3, trainer.max_steps=300]
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

COLUMNS = ["name", "tau", "hit@1", "hit@5", "loss", "steps", "supervised_rows", "seconds", "overrides"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    arguments = parser.parse_args()
    trials = yaml.safe_load(arguments.trials.read_text(encoding="utf-8"))
    results = arguments.trials.with_suffix(".csv")
    done = set()
    if results.exists():
        with results.open(newline="", encoding="utf-8") as file:
            done = {row["name"] for row in csv.DictReader(file)}
    with tempfile.TemporaryDirectory() as scratch:
        for trial in trials:
            if trial["name"] not in done:
                record(results, run(trial, (arguments.keep or Path(scratch)) / trial["name"]))


def run(trial: dict, folder: Path) -> dict:
    print(f"== {trial['name']}: {' '.join(trial['overrides'])}", flush=True)
    job = [sys.executable, "-m", "eaglelab.cli.main", "train", *trial["overrides"], f"hydra.run.dir={folder}"]
    subprocess.run(job, check=True)
    training = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["training"]
    final = training["final"]
    return {
        "name": trial["name"],
        "tau": round(final["val/tau"], 4),
        "hit@1": round(final["val/hit@1"], 4),
        "hit@5": round(final["val/hit@5"], 4),
        "loss": round(final["train/loss"], 4),
        "steps": training["optimizer_steps"],
        "supervised_rows": training["supervised_rows"],
        "seconds": round(training["seconds"], 1),
        "overrides": " ".join(trial["overrides"]),
    }


def record(results: Path, row: dict) -> None:
    new = not results.exists()
    with results.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
