"""What a comparison did not control, as sentences; from its own figures."""

from __future__ import annotations

from collections.abc import Sequence

from eaglelab.report.comparison import Comparison
from eaglelab.report.tables import number

UNITS = {"rows": "supervised_rows", "steps": "optimizer_steps", "seconds": "seconds"}
WORDS = {"supervised_rows": "supervised rows", "optimizer_steps": "optimizer steps", "seconds": "seconds of training"}
CLOSE = 0.02  # relative spread below which drafters count as matched
SHOWN = 0.05  # largest corrected p of a difference that counts as shown
HIGH = 0.1  # share of answers that were cut off worth a word


def limits(comparison: Comparison) -> list[str]:
    """The results' notes, then what the figures show beside them."""
    found = [f"{note[0].upper()}{note[1:].rstrip('.')}." for note in comparison.results.get("notes", ())]
    found += unmatched(comparison)
    found += [*parameters(comparison), *few(comparison), *powerless(comparison)]
    found += [*cut_off(comparison), *machine(comparison)]
    return found


def unmatched(comparison: Comparison) -> list[str]:
    """Quantities of the trainings that differ between drafters, first of all the one that the budget was to fix."""
    trained_here = bool(comparison.asked.get("variants"))
    unit = (comparison.asked.get("budget") or {}).get("unit") if trained_here else None
    matched = UNITS.get(str(unit))
    found: list[str] = []
    for key, word in WORDS.items():
        means = {name: _mean(comparison, name, key) for name in comparison.names}
        known = [value for value in means.values() if value is not None]
        if len(known) > 1 and max(known) > (1 + CLOSE) * min(known):
            said = ", ".join(f"{name} {number(value, 0)}" for name, value in means.items() if value is not None)
            if key == matched:
                found.insert(0, f"The budget is in {word}, yet the trainings came out at {said}.")
            else:
                found.append(f"The trainings differ in {word}: {said}.")
    return found


def _mean(comparison: Comparison, name: str, key: str) -> float | None:
    values = [one.figures.get(key) for one in comparison.trainings if one.name == name]
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def parameters(comparison: Comparison) -> list[str]:
    sizes = {name: _mean(comparison, name, "drafter_parameters") for name in comparison.names}
    known = [value for value in sizes.values() if value]
    if len(known) < 2 or max(known) <= (1 + CLOSE) * min(known):
        return []
    said = ", ".join(f"{name} {number(value / 1e6)} million" for name, value in sizes.items() if value)
    return [f"Drafters have different numbers of trained parameters: {said}."]


def few(comparison: Comparison) -> list[str]:
    """Few prompts make wide intervals; bootstrap intervals of very few are too narrow besides."""
    counts = {suite: len({turn["id"] for turn in comparison.pool(suite=suite).turns()}) for suite in comparison.suites}
    small = [f"{suite} {count}" for suite, count in counts.items() if count < 30]
    return [f"Few prompts, for which bootstrap intervals are too narrow: {', '.join(small)}."] if small else []


def powerless(comparison: Comparison) -> list[str]:
    """Tests that could not have shown any difference: swapping n prompts gives no p below 2 / 2^n."""
    found = {}
    for row in comparison.results.get("contrasts", ()):
        prompts, tests = row["prompts"], row["tests"]
        least = min(1.0, 2 / 2**prompts * tests)
        if least > SHOWN:
            asked = f"{prompts} prompts and {tests} test{'' if tests == 1 else 's'}"
            found[row["suite"]] = f"{row['suite']}: {asked} leave no corrected p below {least:.2g}, so that no "
    return [f"{one}difference between drafters could be shown there." for one in found.values()]


def cut_off(comparison: Comparison) -> list[str]:
    turns = list(comparison.pool().turns())
    cut = sum(turn["stop_reason"] == "length" for turn in turns)
    if not turns or cut < HIGH * len(turns):
        return []
    limit = comparison.cells[0]["settings"]["max_new_tokens"]
    return [
        f"{100 * cut / len(turns):.0f}% of the answers were cut off at {limit} tokens; a model that repeats itself up "
        "to such a limit is easy to draft for."
    ]


def machine(comparison: Comparison) -> list[str]:
    """Where the times come from."""
    kinds: Sequence[tuple[str, int]] = sorted(
        {(cell["settings"]["device"], cell["settings"]["threads"]) for cell in comparison.cells}
    )
    where = "; ".join(f"{device}, {threads} thread{'s' if threads > 1 else ''}" for device, threads in kinds)
    return [
        f"Times are of one machine ({where}) and include whatever else ran on it. Plain decoding and decoding with the "
        "drafter took turns prompt by prompt, so that their ratio suffers least."
    ]
