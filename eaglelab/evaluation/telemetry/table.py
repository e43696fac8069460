"""The table of totals that `eaglelab evaluate telemetry=FILE` prints: plain text, 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaglelab.evaluation.report import WIDTH


def telemetry_table(summary: Mapping[str, Any], title: str = "rounds") -> str:
    """Lay out `summarize_rounds` for reading, 80 columns wide."""
    lines = [title[:WIDTH], "-" * WIDTH]
    lines += [f"{label:<11}{value:>13}   {note}".rstrip()[:WIDTH] for label, value, note in _totals(summary)]
    if summary["by_depth"]:
        lines += ["", "acceptance by depth: of all rounds; of rounds that came so far; of nodes"]
        lines += [f"{'depth':>5}{'all':>9}{'next':>9}{'rounds':>9}{'nodes':>10}{'confidence':>13}{'accepted':>11}"]
        lines += [
            f"{row['depth']:>5}{_share(row['cumulative']):>9}{_share(row['conditional']):>9}{row['rounds']:>9}"
            f"{row['nodes']:>10}{_share(row['confidence']):>13}{_share(row['acceptance']):>11}"
            for row in summary["by_depth"]
        ]
    if summary["calibration"]["nodes"]:
        lines += ["", "draft confidence against observed acceptance, with 95 % intervals"]
        lines += [f"{'confidence':<14}{'nodes':>9}{'mean':>9}{'accepted':>11}{'interval':>18}"]
        lines += [_bin(row) for row in summary["calibration"]["reliability"] if row["nodes"]]
    if summary["experts"]:
        lines += ["", f"{'mixture layer':<14}{'root':>9}{'union':>9}   experts per round"]
        lines += [f"{row['layer']:<14}{row['root']:>9.2f}{row['union']:>9.2f}" for row in summary["experts"]["layers"]]
    if summary["batches"]:
        lines += [
            "",
            f"{'batch':>5}{'rounds':>9}{'tau':>7}{'tokens/s':>11}{'round':>12}{'p95':>12}{'request':>12}{'p95':>12}",
        ]
        lines += [_batch_line(row) for row in summary["batches"]]
    return "\n".join(lines)


def _totals(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    nodes, time, table, kv = (summary[key] for key in ("nodes", "time", "calibration", "kv_bytes"))
    ends = ", ".join(f"{reason} {count}" for reason, count in summary["stops"].items())
    split = [f"{phase} {_share(share, 0)}" for phase, share in time["split"].items() if share is not None]
    amount = f"{summary['tokens']} tokens in {summary['rounds']} rounds of {summary['requests']} requests"
    rows = [
        ("tau", _number(summary["tau"]), "accepted draft tokens + 1, all rounds pooled"),
        ("rounds", str(summary["rounds"]), amount),
        ("", "", f"ended by {ends}" if ends else ""),
        ("nodes", _number(nodes["retained"], 1), "drafted and retained per round"),
        ("", _number(nodes["expanded"], 1), "expanded"),
        ("", _number(nodes["verified"], 1), "rows verified, the root included"),
        ("time", f"{time['total_s']:.2f} s", ", ".join(split)),
        ("ECE", _number(table["expected_error"], 4), f"confidence against acceptance, {table['nodes']} nodes"),
        ("Brier", _number(table["brier"], 4), "mean of (confidence - accepted) squared"),
        ("K/V", _bytes(kv["target"]["mean"]), f"temporary target rows, at most {_bytes(kv['target']['max'])}"),
        ("", _bytes(kv["draft"]["mean"]), f"temporary draft rows, at most {_bytes(kv['draft']['max'])}"),
    ]
    if experts := summary["experts"]:
        note = f"per mixture layer; root row alone {experts['root']:.2f}, ratio {_number(experts['ratio'])}"
        rows.append(("experts", _number(experts["union"]), note))
    return [row for row in rows if any(row)]


def _bin(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    name, interval = f"{row['low']:.2f} to {row['high']:.2f}", f"{low:.1%} to {high:.1%}"
    return f"{name:<14}{row['nodes']:>9}{_share(row['confidence']):>9}{_share(row['acceptance']):>11}{interval:>18}"


def _batch_line(row: Mapping[str, Any]) -> str:
    times = []
    for key in ("round_s", "request_s"):
        spread = row[key] or {}
        times += [_milliseconds(spread.get("median")), _milliseconds(spread.get("p95"))]
    rate = _number(row["tokens_per_s"], 1)
    return f"{row['batch']:>5}{row['rounds']:>9}{_number(row['tau']):>7}{rate:>11}" + "".join(f"{t:>12}" for t in times)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.1f} ms"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
