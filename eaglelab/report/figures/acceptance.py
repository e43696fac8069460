"""How much is accepted: tau by task, and acceptance by depth of the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eaglelab.report.comparison import Comparison
from eaglelab.report.style import Palette, Panel, axes, legend_below
from eaglelab.report.tables import file_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALL = "all tasks"


def by_task(comparison: Comparison, palette: Palette, tree: str, temperature: float) -> Panel:
    """One line of the plot per suite, one mark per drafter, 95 % intervals where they are known."""
    tasks = comparison.suites if len(comparison.suites) == 1 else [*comparison.suites, ALL]
    names = comparison.names
    batch = comparison.batches[0]
    where = {"tree": tree, "temperature": temperature, "batch": batch}
    with axes(1.3 + 0.24 * len(tasks) * max(2, len(names)) ** 0.5, title=f"{tree}, T = {temperature:g}") as (
        figure,
        plot,
    ):
        for number, name in enumerate(names):
            offset = (number - (len(names) - 1) / 2) * 0.5 / max(1, len(names) - 1)
            for place, task in enumerate(tasks):
                labels = where | {"name": name} | ({} if task == ALL else {"suite": task})
                pool = comparison.pool(**labels)
                if pool.tau is not None:
                    interval = comparison.interval("tau", **labels)
                    _mark(plot, palette, name, pool.tau, place + offset, interval)
        plot.set_yticks(range(len(tasks)), tasks)
        plot.set_ylim(len(tasks) - 0.5, -0.5)
        plot.grid(axis="y", visible=False)
        for line in range(1, len(tasks)):
            plot.axhline(line - 0.5, color="#e6e9ed", linewidth=0.8, zorder=0)
        plot.set_xlabel("tau (tokens per round)")
        plot.tick_params(axis="y", length=0)
        legend_below(figure, plot)
    return Panel(
        file_name("tau", tree, f"T{temperature:g}"),
        figure,
        f"Tau of {tree} trees at temperature {temperature:g}, batch {batch}; all training seeds pooled. Bars: 95 % "
        "bootstrap intervals over prompts.",
        f"Acceptance length tau by task and drafter, {tree} tree, temperature {temperature:g}",
    )


def _mark(
    plot: Axes, palette: Palette, name: str, value: float, height: float, interval: tuple[float, float] | None
) -> None:
    style: dict[str, Any] = palette.line(name) | {"linestyle": "none"}
    if interval is None:
        plot.plot([value], [height], **style)
        return
    ends = [[max(0.0, value - interval[0])], [max(0.0, interval[1] - value)]]
    plot.errorbar([value], [height], xerr=ends, elinewidth=1.4, capsize=0, **style)


def by_depth(comparison: Comparison, palette: Palette, tree: str, temperature: float, *, conditional: bool) -> Panel:
    """Acceptance against depth: of all rounds, or of the rounds that came so far."""
    kind = "conditional" if conditional else "cumulative"
    batch = comparison.batches[0]
    with axes(title=f"{tree}, T = {temperature:g}: {kind}") as (figure, plot):
        deepest = 1
        for name in comparison.names:
            pool = comparison.pool(name=name, tree=tree, temperature=temperature, batch=batch)
            levels = [one for one in pool.levels if one.conditional is not None or not conditional]
            if not levels:
                continue
            deepest = max(deepest, levels[-1].depth)
            depths = [level.depth for level in levels]
            shares = [(level.conditional if conditional else level.cumulative) or 0.0 for level in levels]
            plot.plot(depths, [100 * share for share in shares], **palette.line(name))
            if conditional:
                low = [100 * (level.interval or (0, 0))[0] for level in levels]
                high = [100 * (level.interval or (0, 0))[1] for level in levels]
                plot.fill_between(depths, low, high, color=palette.color(name), alpha=0.13, linewidth=0)
        plot.set_xticks(range(1, deepest + 1))
        plot.set_xlim(0.7, deepest + 0.3)
        plot.set_ylim(0, 103)
        plot.set(xlabel="depth (draft tokens)", ylabel="accepted, %")
        legend_below(figure, plot)
    what = (
        "Share of rounds that accepted the level, of those that had accepted the level before and whose tree went so "
        "deep. Bands: 95 % Wilson intervals of rounds."
        if conditional
        else "Share of all rounds in which at least so many draft tokens were accepted; tau is 1 + their sum."
    )
    return Panel(
        file_name("depth", kind, tree, f"T{temperature:g}"),
        figure,
        f"{what} Here: {tree}, temperature {temperature:g}, batch {batch}; tasks and seeds pooled.",
        f"Acceptance by depth, {kind}, {tree} tree, temperature {temperature:g}",
    )
