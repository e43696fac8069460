"""One look for all figures: colour-blind safe, legible on paper, and SVG that a page can hold inline."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, without yellow and black; the order keeps neighbours apart in grey too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
PHASE_COLORS = {"draft": "#56B4E9", "pack": "#999999", "verify": "#0072B2", "commit": "#CC79A7", "other": "#D9D9D9"}
SOFT = "#5a646e"
WIDTH = 4.9  # inches

RC: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": SOFT,
    "axes.edgecolor": "#9aa3ac",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.7,
    "xtick.color": "#9aa3ac",
    "ytick.color": "#9aa3ac",
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
}


def _rc(name: str = "") -> Any:
    """name: of the figure, from which its SVG's ids are made."""
    return {**RC, "svg.hashsalt": name}


@dataclass(frozen=True)
class Palette:
    """Colour and marker of each drafter, the same in every figure and table."""

    names: Sequence[str]

    def color(self, name: str) -> str:
        return COLORS[self.names.index(name) % len(COLORS)]

    def marker(self, name: str) -> str:
        return MARKERS[self.names.index(name) % len(MARKERS)]

    def line(self, name: str) -> dict[str, Any]:
        return {"color": self.color(name), "marker": self.marker(name), "label": name}


@dataclass(frozen=True)
class Panel:
    """A figure with its place in the report.

    name: of its files.
    caption: what is shown, of what, with which intervals.
    described: the same for people who cannot see it, in a few words.
    """

    name: str
    figure: Figure
    caption: str
    described: str

    def save(self, folder: Path) -> list[Path]:
        """`folder/NAME.svg` and `.png`."""
        from matplotlib import rc_context

        folder.mkdir(parents=True, exist_ok=True)
        svg, png = (folder / f"{self.name}.{ending}" for ending in ("svg", "png"))
        svg.write_text(self._drawn, encoding="utf-8")
        with rc_context(_rc(self.name)):
            self.figure.savefig(png, dpi=200)
        return [svg, png]

    @cached_property
    def _drawn(self) -> str:
        from matplotlib import rc_context

        text = io.StringIO()
        with rc_context(_rc(self.name)):
            self.figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
            self.figure.set_layout_engine("none")  # laid out now, which takes longer than drawing
        return text.getvalue()

    @property
    def svg(self) -> Markup:
        """For a page: without a size of its own, and with ids that no other figure has."""
        svg = self._drawn[self._drawn.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'\bid="([^"]*)"', rf'id="{self.name}-\1"', svg)
        svg = re.sub(r'href="#([^"]*)"', rf'href="#{self.name}-\1"', svg)
        svg = re.sub(r"url\(#([^)]*)\)", rf"url(#{self.name}-\1)", svg)
        opening = re.sub(r' (width|height)="[^"]*pt"', "", svg[: svg.index(">")])
        return Markup(f'{opening} role="img" aria-label="{escape(self.described)}">{svg[svg.index(">") + 1 :]}')


@contextmanager
def axes(height: float = 3.1, **settings: Any) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one plot in the house style, `height` inches high; `settings` are the plot's (title, labels, limits).

    All figures are of one width, so that their letters are of one size in a page.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_rc()):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        plot = figure.subplots()
        yield figure, plot
        plot.set(**settings)


def legend_below(figure: Figure, plot: Axes, *, columns: int = 4) -> None:
    """One legend under the plot, each name once."""
    handles, labels = plot.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if len(unique) > 1:
        figure.legend(unique.values(), unique.keys(), loc="outside lower left", ncols=min(columns, len(unique)))
