"""What `eaglelab compare` prints at its end: plain text, at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 100


def comparison_table(results: Mapping[str, Any]) -> str:
    """Lay out ``results.json`` for reading: trainings, then tau and speed-up by place, then contrasts."""
    parts = [_trainings(results["runs"])]
    for suite in dict.fromkeys(row["suite"] for row in results["summary"]):
        parts.append(_suite(suite, [row for row in results["summary"] if row["suite"] == suite]))
        chosen = [row for row in results["contrasts"] if row["suite"] == suite]
        if chosen:
            parts.append(_contrasts(suite, chosen))
    return "\n\n".join(parts)


def _trainings(runs: Sequence[Mapping[str, Any]]) -> str:
    width = max(7, *(len(run["name"]) for run in runs)) + 2
    head = f"{'drafter':<{width}}{'seed':>5}{'steps':>8}{'rows':>11}{'FLOP':>10}{'seconds':>9}{'parameters':>12}"
    lines = ["trainings", "-" * WIDTH, f"{head}{'simulated tau':>15}{'real, chain':>13}"]
    for run in runs:
        flops = "-" if run["flops"] is None else f"{run['flops']:.2e}"
        lines.append(
            f"{run['name']:<{width}}{run['seed']:>5}{_count(run['steps']):>8}{_count(run['supervised_rows']):>11}"
            f"{flops:>10}{_number(run['seconds'], 0):>9}{_count(run['parameters']):>12}"
            f"{_number(run['simulated_tau']):>15}{_number(run['real_chain_tau']):>13}"
        )
    return "\n".join(lines)


def _suite(suite: str, rows: Sequence[Mapping[str, Any]]) -> str:
    prompts = rows[0]["prompts"]
    width = max(7, *(len(row["name"]) for row in rows)) + 2
    lines = [f"{suite}, {prompts} questions; 95 % intervals over questions and training seeds", "-" * WIDTH]
    lines.append(
        f"{'tree':<10}{'T':>4}{'batch':>7}  {'drafter':<{width}}{'tau':>6}{'interval':>15}"
        f"{'speed-up':>11}{'interval':>15}{'identical':>14}"
    )
    before = None
    for row in rows:
        place = (row["tree"], row["temperature"], row["batch"])
        label = f"{row['tree'][:10]:<10}{row['temperature']:>4g}{row['batch']:>7}" if place != before else " " * 21
        before = place
        same = f"{row['identical']} of {row['answers']}" + ("" if row["same_text_expected"] else "*")
        lines.append(
            f"{label}  {row['name']:<{width}}{_number(row['tau']):>6}{_ends(row, 'tau'):>15}"
            f"{_number(row['speedup'], unit='x'):>11}{_ends(row, 'speedup'):>15}{same:>14}"
        )
    if not all(row["same_text_expected"] for row in rows):
        lines.append("* a sampled tree keeps the law of the text, not the text")
    return "\n".join(lines)


def _contrasts(suite: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{suite}: paired differences; p by swapping question by question, Holm-corrected", "-" * WIDTH]
    width = max(len(f"{row['one']} - {row['other']}") for row in rows) + 2
    lines.append(
        f"{'':<10}{'tree':<10}{'T':>4}{'batch':>7}  {'':<{width}}{'difference':>11}{'interval':>18}{'p':>8}  verdict"
    )
    for measure in dict.fromkeys(row["measure"] for row in rows):
        label = {"tau": "tau", "speedup": "speed-up"}.get(measure, measure)
        for row in _worth_showing([row for row in rows if row["measure"] == measure]):
            ends = _ends(row, "difference", sign="+")
            pair = f"{row['one']} - {row['other']}"
            lines.append(
                f"{label:<10}{row['tree'][:10]:<10}{row['temperature']:>4g}{row['batch']:>7}  {pair:<{width}}"
                f"{_number(row['difference'], sign='+'):>11}{ends:>18}{_number(row['p_holm'], 3):>8}  {row['verdict']}"
            )
            label = ""
    return "\n".join(lines)


def _worth_showing(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """tau once per tree and temperature where the batch changes nothing: the answers are the same."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for row in rows:
        key = (row["measure"], row["tree"], row["temperature"], row["one"], row["other"], row["difference"])
        if row["measure"] != "tau" or key not in seen:
            kept.append(row)
        seen.add(key)
    return kept


def _ends(row: Mapping[str, Any], name: str, *, sign: str = "") -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "-" if low is None else f"{low:{sign}.2f} to {high:{sign}.2f}"


def _number(value: float | None, digits: int = 2, *, unit: str = "", sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}{unit}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
