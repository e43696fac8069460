"""Tables as data, and as Markdown and LaTeX; the page lays them out itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NONE = "–"  # noqa: RUF001


@dataclass(frozen=True)
class Column:
    """unit: shown under the title; number: aligned to the right."""

    title: str
    unit: str = ""
    number: bool = True


@dataclass(frozen=True)
class Entry:
    """What stands in a place of a table.

    range: its interval, shown smaller beside it.
    drafter: whose it is, for its colour.
    verdict: marked as one.
    differs: marked as different from its neighbours.
    """

    text: str
    range: str = ""
    drafter: str = ""
    verdict: str = ""
    differs: bool = False
    code: bool = False

    @property
    def whole(self) -> str:
        return f"{self.text} ({self.range})" if self.range else self.text


Row = list[Entry]


@dataclass
class Table:
    """name: of its files; starts: rows that open a group."""

    name: str
    caption: str
    columns: list[Column]
    rows: list[Row] = field(default_factory=list)
    starts: set[int] = field(default_factory=set)

    def add(self, entries: Sequence[Entry | str], *, start: bool = False) -> None:
        row = [Entry(one) if isinstance(one, str) else one for one in entries]
        assert len(row) == len(self.columns)
        if start:
            self.starts.add(len(self.rows))
        self.rows.append(row)

    def drop_unknown(self) -> None:
        """Leave out the columns in which nothing is known."""
        known = [place for place in range(len(self.columns)) if any(row[place].text != NONE for row in self.rows)]
        self.columns = [self.columns[place] for place in known]
        self.rows = [[row[place] for place in known] for row in self.rows]

    def save(self, folder: Path) -> list[Path]:
        """`folder/NAME.md` and `.tex`."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for ending, text in (("md", markdown(self)), ("tex", latex(self))):
            path = folder / f"{self.name}.{ending}"
            path.write_text(text, encoding="utf-8")
            written.append(path)
        return written


def number(value: float | None, digits: int = 2, *, unit: str = "", sign: bool = False) -> str:
    """Fixed digits, a true minus sign, thousands apart; a dash for None."""
    if value is None:
        return NONE
    text = f"{value:{'+' if sign else ''},.{digits}f}{unit}"
    return text.replace("-", "\N{MINUS SIGN}")


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None else f"{100 * share:.{digits}f}%"


def between(ends: Sequence[float | None] | None, digits: int = 2, *, unit: str = "", sign: bool = False) -> str:
    """`3.77 to 4.12`; empty without an interval."""
    if ends is None or None in ends:
        return ""
    return " to ".join(number(end, digits, unit=unit, sign=sign) for end in ends)


def file_name(*parts: str) -> str:
    """`tau-chain-T0`: parts of any text as a name for files and for ids in a page."""
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", part) for part in parts)


# --- files ----------------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """A pipe table under its caption."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |\n"

    titles = [f"{one.title}, {one.unit}" if one.unit else one.title for one in table.columns]
    text = f"{table.caption}\n\n" + line([_pipe(title) for title in titles])
    text += line(["---:" if one.number else "---" for one in table.columns])
    return text + "".join(line([_pipe(entry.whole) for entry in row]) for row in table.rows)


def _pipe(text: str) -> str:
    text = re.sub(r"\s*\n\s*", " ", text).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("<", "&lt;").replace("`", "\\`")


def latex(table: Table) -> str:
    r"""A `table` with a `booktabs` tabular; needs `\usepackage{booktabs}`."""
    titles = [f"{one.title} ({one.unit})" if one.unit else one.title for one in table.columns]
    lines = [
        "% \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering\\small",
        f"  \\caption{{{_tex(table.caption)}}}",
        f"  \\label{{tab:{table.name}}}",
        f"  \\begin{{tabular}}{{{''.join('r' if one.number else 'l' for one in table.columns)}}}",
        "    \\toprule",
        f"    {' & '.join(_tex(title) for title in titles)} \\\\",
        "    \\midrule",
    ]
    for place, row in enumerate(table.rows):
        if place in table.starts and place > 0:
            lines.append("    \\addlinespace")
        entries = [_tex(one.text) + (f" {{\\scriptsize ({_tex(one.range)})}}" if one.range else "") for one in row]
        lines.append(f"    {' & '.join(entries)} \\\\")
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""])


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\N{MINUS SIGN}": "$-$",
    NONE: "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text.replace("\n", " "))
