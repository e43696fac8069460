"""Draw the learning curves of every candidate from results/*.csv.

python experiments/bundled_target/plot_curves.py
"""

import csv
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "eaglelab"
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for path in sorted(RESULTS.glob("*.csv")):
        with open(path, newline="") as log:
            rows = list(csv.DictReader(log))
        tokens = [int(row["tokens"]) / 1e6 for row in rows]
        axes.plot(tokens, [float(row["held_out_ppl"]) for row in rows], "o-", ms=3, label=path.stem)
    axes.set(
        xlabel="trained tokens, millions (one epoch is 1.6)",
        ylabel="held-out perplexity per answer token",
        yscale="log",
    )
    ticks = [2.5, 3, 4, 5, 6, 8, 10, 15, 20, 25]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "learning_curves.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
