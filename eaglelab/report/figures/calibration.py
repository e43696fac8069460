"""Is the drafter's confidence the share of nodes that the target accepts?"""

from __future__ import annotations

from eaglelab.report.comparison import Comparison
from eaglelab.report.style import SOFT, Palette, Panel, axes, legend_below
from eaglelab.report.tables import file_name


def reliability(comparison: Comparison, palette: Palette, tree: str, temperature: float) -> Panel:
    """Observed acceptance against confidence, by bins of confidence."""
    batch = comparison.batches[0]
    with axes(
        4.0,
        title=f"{tree}, T = {temperature:g}",
        xlabel="confidence of a node's path, %",
        ylabel="nodes accepted, %",
        xlim=(-2, 102),
        ylim=(-2, 102),
    ) as (figure, plot):
        plot.plot([0, 100], [0, 100], color=SOFT, linewidth=0.9)
        plot.set_aspect("equal", adjustable="box")
        for name in comparison.names:
            pool = comparison.pool(name=name, tree=tree, temperature=temperature, batch=batch)
            if not pool.bins:
                continue
            ends = [
                [100 * max(0.0, one.acceptance - one.interval[0]) for one in pool.bins],
                [100 * max(0.0, one.interval[1] - one.acceptance) for one in pool.bins],
            ]
            plot.errorbar(
                [100 * one.confidence for one in pool.bins],
                [100 * one.acceptance for one in pool.bins],
                yerr=ends,
                elinewidth=1,
                capsize=0,
                linewidth=1.1,
                **palette.line(name),
            )
        legend_below(figure, plot)
    return Panel(
        file_name("reliability", tree, f"T{temperature:g}"),
        figure,
        "Above the line the drafter is too modest, below it too sure. Bars: 95 % Wilson intervals; nodes of one "
        f"tree are not independent. Here: {tree}, temperature {temperature:g}, batch {batch}; tasks and seeds pooled.",
        f"Reliability diagram, {tree} tree, temperature {temperature:g}",
    )
