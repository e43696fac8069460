"""What acceptance buys: speed-up against tau, and where the time of a round went."""

from __future__ import annotations

from eaglelab.report.comparison import Comparison
from eaglelab.report.pooling import PHASES
from eaglelab.report.style import PHASE_COLORS, SOFT, Palette, Panel, axes

TREE_MARKERS = ("o", "s", "^", "D", "v", "P")


def speed_against_tau(comparison: Comparison, palette: Palette, batch: int) -> Panel:
    """One mark per drafter, tree and temperature; on the ideal line a round costs what a plain step costs."""
    labels = {"xlabel": "tau (tokens per round)", "ylabel": "speed-up over plain decoding"}
    with axes(3.9, title=f"batch {batch}", **labels) as (figure, plot):
        most = 1.0
        for name in comparison.names:
            for tree in comparison.trees:
                for temperature in comparison.temperatures:
                    pool = comparison.pool(name=name, tree=tree, temperature=temperature, batch=batch)
                    if pool.tau is None or pool.speedup is None:
                        continue
                    most = max(most, pool.tau, pool.speedup)
                    cold = temperature == comparison.temperatures[0]
                    color = palette.color(name)
                    marker = TREE_MARKERS[comparison.trees.index(tree) % len(TREE_MARKERS)]
                    face = color if cold else "white"
                    plot.plot(pool.tau, pool.speedup, marker, color=color, markerfacecolor=face, markeredgewidth=1.4)
        top = most * 1.06
        plot.plot([1, top], [1, top], color=SOFT, linewidth=1)
        plot.plot([1, top], [0.5, top / 2], color=SOFT, linewidth=0.8, linestyle=(0, (4, 3)))
        plot.axhline(1, color=SOFT, linewidth=0.8, linestyle=(0, (1, 2)))
        for height, word in ((top, "= tau"), (top / 2, "half of tau"), (1, "plain decoding")):
            plot.text(top + 0.02 * (top - 1), height, word, va="center", color=SOFT, fontsize=8)
        plot.set_xlim(0.8, top)
        plot.set_ylim(0, top)
        plot.set_aspect("equal", adjustable="box")
        _legend(comparison, palette, figure)
    lowest, *warm = comparison.temperatures
    filled = f"Filled: T = {lowest:g}" + (f"; hollow: T = {', '.join(f'{t:g}' for t in warm)}" if warm else "")
    return Panel(
        f"speed-b{batch}",
        figure,
        f"Speed-up over plain decoding of the same engine at batch {batch}, tasks and seeds pooled. {filled}. A point "
        "on the solid line would pay nothing for drafting and for verifying more rows than one.",
        f"Speed-up against tau at batch {batch}",
    )


def _legend(comparison: Comparison, palette: Palette, figure: object) -> None:
    from matplotlib.lines import Line2D

    def mark(label: str, marker: str, color: str) -> Line2D:
        return Line2D([], [], linestyle="none", marker=marker, color=color, label=label)

    handles = [mark(name, "o", palette.color(name)) for name in comparison.names]
    handles += [
        mark(tree, TREE_MARKERS[place % len(TREE_MARKERS)], SOFT) for place, tree in enumerate(comparison.trees)
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, columnspacing=1.2)  # type: ignore[attr-defined]


def time_of_a_round(comparison: Comparison, batch: int, temperature: float) -> Panel:
    """Milliseconds of a round by phase, beside those of a plain step."""
    rows = []
    for tree in comparison.trees:
        for name in comparison.names:
            pool = comparison.pool(name=name, tree=tree, temperature=temperature, batch=batch)
            if pool.phases_ms is not None:
                rows.append((f"{name}, {tree}", pool.phases_ms, pool.plain_ms))
    with axes(1.4 + 0.27 * len(rows), title=f"batch {batch}, T = {temperature:g}") as (figure, plot):
        left = [0.0] * len(rows)
        for phase in PHASES:
            widths = [max(0.0, row[1][phase]) for row in rows]
            plot.barh(range(len(rows)), widths, 0.66, left, color=PHASE_COLORS[phase], label=phase)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, (_, _, plain) in enumerate(rows):
            if plain is not None:
                label = "plain step" if place == 0 else None
                plot.plot([plain, plain], [place - 0.42, place + 0.42], color="black", linewidth=1.8, label=label)
        plot.set_yticks(range(len(rows)), [row[0] for row in rows])
        plot.set_ylim(len(rows) - 0.4, -0.6)
        plot.grid(axis="y", visible=False)
        plot.tick_params(axis="y", length=0)
        plot.set_xlabel("ms per round" if batch == 1 else "ms per round and sequence")
        figure.legend(loc="outside lower left", ncols=6, columnspacing=1.2, handlelength=1.2)
    return Panel(
        f"time-b{batch}-T{temperature:g}",
        figure,
        f"Where the time of a round went at batch {batch}, temperature {temperature:g}; the black mark is one step of "
        "plain decoding, measured in turns with it. Speed-up is tau times mark over bar, but for rounds cut at the end "
        "of an answer.",
        f"Time of a round by phase at batch {batch}",
    )
