"""How fast drafters learn: simulated tau against seconds and against supervised rows."""

from __future__ import annotations

from typing import Literal

from eaglelab.report.comparison import Comparison
from eaglelab.report.style import Palette, Panel, axes, legend_below


def training_curves(comparison: Comparison, palette: Palette, against: Literal["seconds", "rows"]) -> Panel | None:
    """One line per run; None where no run has a curve."""
    drawn = False
    with axes(title=f"by {against}", ylabel="simulated tau") as (figure, plot):
        for training in comparison.trainings:
            points = [(getattr(point, against), point.tau) for point in training.curve]
            known = [(x, tau) for x, tau in points if x is not None]
            if not known:
                continue
            drawn = True
            scale = 1 if against == "seconds" else 1000
            style = palette.line(training.name) | {"markersize": 3.5, "linewidth": 1.3}
            plot.plot([x / scale for x, _ in known], [tau for _, tau in known], **style)
        plot.set_xlabel("seconds of training" if against == "seconds" else "thousand supervised rows")
        plot.set_xlim(left=0)
        legend_below(figure, plot)
    if not drawn:
        return None
    note = "Rows that the loss was computed on, repetitions counted."
    if against == "seconds":
        exact = all(training.exact_seconds for training in comparison.trainings if training.curve)
        note = "Validation included." if exact else "The run's seconds, divided evenly over its optimizer steps."
    return Panel(
        f"training-{against}",
        figure,
        f"Tau of a chain, simulated on held-out conversations during training; one line per training seed. {note}",
        f"Simulated tau during training against {against}",
    )
