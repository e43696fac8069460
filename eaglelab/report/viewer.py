"""`write_trees`: a page of draft trees alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eaglelab.report.page import render, write_page
from eaglelab.report.trees import MAX_ROUNDS, load_answers, record_files


def write_trees(
    source: str | Path, out: str | Path, *, ids: Sequence[str] | None = None, max_rounds: int = MAX_ROUNDS
) -> Path:
    """A page that steps through the rounds of answers, from the records that `telemetry=FILE` wrote.

    Args:
        source: a file of records, or a folder that holds some (`rounds.parquet` or `rounds.jsonl`, at any depth).
        out: the page.
        ids: of the answers to show; None: the first ones, whole, up to `max_rounds` rounds in all.

    Raises:
        ValueError: no records there, damaged ones or ones without trees, or an id that is not among them.
    """
    source, out = Path(source), Path(out)
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"out={out}: the page is written as .html; name it so")
    files = list(record_files(source))
    shown = [
        load_answers(file, title=_title(file, source), ids=ids, max_rounds=max(1, max_rounds // len(files)))
        for file in files
    ]
    return write_page(out, render("trees.html.j2", shown, title=f"Draft trees of {source.resolve().name}"))


def _title(file: Path, source: Path) -> str:
    """A cell's name in a folder of them, else the file's."""
    return file.parent.name if source.is_dir() and file.parent != source else file.name
