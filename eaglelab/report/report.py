"""`write_report`: the page, the figures and the tables of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglelab.report import figures
from eaglelab.report.comparison import Comparison
from eaglelab.report.content import contract_table, contrast_table, cost_table, diff_table, flat, summary_table
from eaglelab.report.limits import limits
from eaglelab.report.page import render, write_page
from eaglelab.report.style import Palette, Panel
from eaglelab.report.tables import Table, between, number
from eaglelab.report.trees import NAMES, Answers, load_answers

ANSWERS = 3  # of each drafter in the page's tree viewer


def write_report(
    folder: str | Path,
    *,
    answers: int = ANSWERS,
    ids: Sequence[str] | None = None,
    where: Mapping[str, Any] | None = None,
) -> Path:
    """Write `report.html`, `figures/` and `tables/` into the folder of a comparison.

    Args:
        folder: what `eaglelab compare` wrote; it may be unfinished.
        answers: first answers of each drafter in the tree viewer; 0: no viewer.
        ids: of the prompts in the viewer, instead.
        where: the viewer's cell: `suite`, `tree`, `temperature`, `batch`. What is left open is the first suite, a
            dynamic tree or else the one with the most nodes, the lowest temperature and the smallest batch.

    Returns:
        The page. It is one file that loads nothing.

    Raises:
        ValueError: no comparison there, nothing measured yet, a damaged file, or no such cell or prompt.
    """
    comparison = Comparison(Path(folder))
    palette = Palette(comparison.names)
    trees = viewer_answers(comparison, answers, ids, where or {}) if answers or ids else []
    sections = {name: list(panels) for name, panels in panel_sections(comparison, palette).items()}
    tables = {table.name: table for table in report_tables(comparison)}
    for panels in sections.values():
        for panel in panels:
            panel.save(comparison.folder / "figures")
    for table in tables.values():
        table.save(comparison.folder / "tables")
    text = render(
        "report.html.j2",
        trees,
        title=title_of(comparison),
        budget=budget_of(comparison),
        comparison=comparison,
        palette=palette,
        sections=sections,
        tables=tables,
        by_suite=[table for name, table in tables.items() if name.startswith("summary-")],
        cards=[card(comparison, name) for name in comparison.names],
        limits=limits(comparison),
        settings=settings_of(comparison),
        unfinished=not comparison.results,
    )
    return write_page(comparison.folder / "report.html", text)


def title_of(comparison: Comparison) -> str:
    *others, last = comparison.names
    names = f"{', '.join(others)} and {last}" if others else last
    source = (comparison.asked.get("target") or {}).get("source") or comparison.cells[0]["settings"]["target"]
    return f"{names}, drafting for {'the bundled target' if source == 'bundled' else source}"


def budget_of(comparison: Comparison) -> str:
    """A sentence about what every training could spend; nothing where none was trained for the comparison."""
    budget = comparison.asked.get("budget")
    if not budget or not comparison.asked.get("variants"):
        return "The drafters were trained before." if comparison.asked.get("given") else ""
    values = budget["value"] if isinstance(budget["value"], Mapping) else {"": budget["value"]}
    said = ", ".join(f"{name} {value:,.10g}".strip() for name, value in values.items())
    return f"Budget of each training: {said} {budget['unit']}."


def panel_sections(comparison: Comparison, palette: Palette) -> dict[str, Iterator[Panel]]:
    """Figures by section; in each, those of the first temperature and batch come first."""
    cold, batches = comparison.temperatures[0], comparison.batches
    places = [(tree, temperature) for temperature in comparison.temperatures for tree in comparison.trees]
    here = [place for place in places if comparison.pool(tree=place[0], temperature=place[1]).cells]
    curves = [figures.training_curves(comparison, palette, against) for against in ("seconds", "rows")]
    return {
        "tasks": (figures.by_task(comparison, palette, *place) for place in here),
        "depth": (
            figures.by_depth(comparison, palette, *place, conditional=conditional)
            for place in here
            for conditional in (False, True)
        ),
        "speed": (figures.speed_against_tau(comparison, palette, batch) for batch in batches),
        "time": (figures.time_of_a_round(comparison, batch, cold) for batch in batches),
        "calibration": (figures.reliability(comparison, palette, *place) for place in here),
        "training": iter([panel for panel in curves if panel is not None]),
    }


def report_tables(comparison: Comparison) -> Iterator[Table]:
    yield summary_table(comparison)
    if len(comparison.suites) > 1:
        for suite in comparison.suites:
            yield summary_table(comparison, suite)
    yield contrast_table(comparison)
    yield cost_table(comparison)
    yield contract_table(comparison)
    differences = diff_table(comparison)
    if differences is not None:
        yield differences


def card(comparison: Comparison, name: str) -> dict[str, Any]:
    """A drafter's headline: its best tau and its best speed-up, each with the place where it was measured."""
    found = []
    for tree in comparison.trees:
        for temperature in comparison.temperatures:
            for batch in comparison.batches:
                labels = {"name": name, "tree": tree, "temperature": temperature, "batch": batch}
                pool = comparison.pool(**labels)
                if pool.tau is not None and pool.speedup is not None:
                    found.append((pool, labels, f"{tree}, T {temperature:g}, batch {batch}"))
    lines = []
    for title, measure, unit in (("tau", "tau", ""), ("speed-up", "speedup", "x")):
        if found:
            pool, labels, place = max(found, key=lambda one: getattr(one[0], measure))
            value, ends = number(getattr(pool, measure), unit=unit), comparison.interval(measure, **labels)
            lines.append({"title": title, "value": value, "range": between(ends), "place": place})
    return {"name": name, "lines": lines}


def viewer_answers(
    comparison: Comparison, number: int, ids: Sequence[str] | None, where: Mapping[str, Any]
) -> list[Answers]:
    """The same answers of every drafter, each from the cell that `write_report` describes.

    Raises:
        ValueError: no such cell or prompt.
    """
    usual: dict[str, list[Any]] = {
        "temperature": comparison.temperatures,
        "batch": comparison.batches,
        "suite": comparison.suites,
    }
    chosen = {key: values[0] for key, values in usual.items()} | {k: v for k, v in where.items() if v is not None}
    for key, value in chosen.items():
        there = list(dict.fromkeys(cell["cell"].get(key) for cell in comparison.cells))
        if value not in there:
            raise ValueError(f"where.{key}={value}: no cell of that kind; there are {', '.join(map(str, there))}")
    found = []
    for name in comparison.names:
        cells = [
            cell for cell in comparison.pool(name=name, **chosen).cells if _records(cell) and cell["drafted_nodes"]
        ]
        if cells:
            cell = max(cells, key=_telling)
            first = list(dict.fromkeys(str(turn["id"]) for turn in cell["per_prompt"]))[:number]
            title = f"{name}, {cell['cell']['suite']}, {cell['cell']['tree']}"
            found.append(load_answers(_records(cell)[0], title=title, ids=ids or first))
    return found


def _telling(cell: dict[str, Any]) -> tuple[bool, float, int]:
    """Ranks cells for the viewer: grown trees first, then large ones, then the first seed."""
    grown = cell["cell"]["tree_settings"].get("name") == "dynamic"
    return grown, cell["drafted_nodes"] / cell["rounds"], -cell["cell"]["seed"]


def _records(cell: dict[str, Any]) -> Sequence[Path]:
    return [path for name in NAMES if (path := cell["folder"] / name).is_file()]


def settings_of(comparison: Comparison) -> list[tuple[str, str]]:
    """What was asked, flat, the parts that have tables of their own left out."""
    own = ("runs", "drafters", "format")
    asked = {key: value for key, value in comparison.asked.items() if key not in own}
    fields = [(name, value if isinstance(value, str) else _plain(value)) for name, value in flat(asked)]
    used = comparison.cells[0]["settings"]
    return [*fields, ("decoding.threads", _plain(used["threads"]))]


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return "none" if value is None else str(value)
