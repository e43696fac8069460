"""What `eaglelab compare` prints at its end: plain text, at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 100
PAIRS_ABREAST = 3


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
    """A line per place, a column per pair; more pairs than fit go below."""
    title = f"{suite}: paired differences; * differs, else no difference shown (interval and corrected p)"
    lines = [title, "-" * WIDTH]
    pairs = list(dict.fromkeys((row["one"], row["other"]) for row in rows))
    for first in range(0, len(pairs), PAIRS_ABREAST):
        abreast = pairs[first : first + PAIRS_ABREAST]
        lines.append(f"{'':<9}{'tree':<10}{'T':>3}{'batch':>6}" + "".join(f"  {_pair(pair):<23}" for pair in abreast))
        for measure in dict.fromkeys(row["measure"] for row in rows):
            label = {"tau": "tau", "speedup": "speed-up"}.get(measure, measure)
            for place, by_pair in _places([row for row in rows if row["measure"] == measure]).items():
                tree, temperature, batch = place
                found = [by_pair.get(pair) for pair in abreast]
                lines.append(
                    f"{label:<9}{tree[:10]:<10}{temperature:>3g}{batch:>6}"
                    + "".join(f"  {_shown(row):<23}" for row in found)
                )
                label = ""
    prompts, tests = min((row["prompts"], row["tests"]) for row in rows)
    if (least := min(1.0, tests * 2.0 ** (1 - prompts))) > 0.05:
        of = "1 test" if tests == 1 else f"{tests} tests"
        lines.append(f"{prompts} questions and {of} leave no corrected p below {least:.2g}: too few to show anything")
    return "\n".join(line.rstrip() for line in lines)


def _pair(pair: tuple[str, str]) -> str:
    return f"{pair[0]} - {pair[1]}"[:23]


def _shown(row: Mapping[str, Any] | None) -> str:
    if row is None or row["difference"] is None:
        return "-"
    mark = "*" if row["verdict"] in ("higher", "lower") else ""
    return f"{row['difference']:+.2f} {_ends(row, 'difference', sign='+')}{mark}"


def _places(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, float, Any], dict[tuple[str, str], Mapping[str, Any]]]:
    """(tree, temperature, batch) -> pair -> contrast. tau stands once, with batch `all`, where the batch changes
    nothing: the answers are the same."""
    places: dict[tuple[str, float, Any], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for row in rows:
        place = (row["tree"], row["temperature"], row["batch"])
        places.setdefault(place, {})[row["one"], row["other"]] = row
    if not rows or rows[0]["measure"] != "tau":
        return places
    kept: dict[tuple[str, float, Any], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for tree, temperature in dict.fromkeys(place[:2] for place in places):
        here = {place: pairs for place, pairs in places.items() if place[:2] == (tree, temperature)}
        taus = {tuple(row["difference"] for row in pairs.values()) for pairs in here.values()}
        first = next(iter(here.values()))
        kept |= {(tree, temperature, "all"): first} if len(here) > 1 and len(taus) == 1 else here
    return kept


def _ends(row: Mapping[str, Any], name: str, *, sign: str = "") -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "-" if low is None else f"{low:{sign}.2f} to {high:{sign}.2f}"


def _number(value: float | None, digits: int = 2, *, unit: str = "", sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}{unit}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
