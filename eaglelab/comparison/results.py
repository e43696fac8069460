"""From cells to the numbers that are reported: rows, pooled rows and contrasts.

Letters: S training seeds, P prompts, C sums of a statistic.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eaglelab.comparison.statistics import (
    Array,
    Statistic,
    bootstrap,
    contrast,
    holm,
    interval,
    pooled,
    speedup,
    tau,
    verdict,
)

Figures = Mapping[str, Any]  # content of a cell.json

PLACE = ("suite", "tree", "temperature", "batch")
"""What cells that are compared with each other share."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number that is compared between drafters.

    sums: of one answer's record in ``per_prompt``, [C].
    """

    name: str
    statistic: Statistic
    columns: int

    def sums(self, turn: Mapping[str, Any]) -> list[float]:
        if self.name == "tau":
            return [sum(turn["accepted"]), len(turn["accepted"])]
        sides = (turn["speculative"], turn["baseline"])
        return [value for side in sides for value in (side["round_tokens"], side["decode_s"])]


MEASURES = (Measure("tau", tau, 2), Measure("speedup", speedup, 4))


def table_of(cells: Sequence[Figures], measure: Measure) -> Array:
    """[S, P, C] of one drafter's cells, one per training seed, over prompts in the order of their ids.

    Raises:
        ValueError: the cells answered different prompts.
    """
    tables, ids = [], None
    for cell in cells:
        sums: dict[str, Array] = defaultdict(lambda: np.zeros(measure.columns))
        for turn in cell["per_prompt"]:
            sums[turn["id"]] += np.array(measure.sums(turn), dtype=np.float64)
        names = sorted(sums)
        if ids is not None and names != ids:
            raise ValueError("cells of one drafter answered different prompts; measure them on the same suite")
        ids = names
        tables.append(np.stack([sums[name] for name in names]))
    return np.stack(tables)


def cell_row(figures: Figures, training: Mapping[str, Any], *, resamples: int) -> dict[str, Any]:
    """One flat row of a cell; see docs/comparison.md for the columns."""
    cell, telemetry = figures["cell"], figures["telemetry"]
    spread, same = figures["speedup_spread"] or {}, figures["identical"]
    rate = table_of([figures], MEASURES[1])
    identity = {k: cell[k] for k in ("name", "variant", "seed", "suite", "tree", "temperature", "batch")}
    return identity | {
        "tau": figures["tau"],
        "tau_low": _end(figures["tau_interval"], 0),
        "tau_high": _end(figures["tau_interval"], 1),
        "tau_ended": figures["tau_ended"],
        "speedup": figures["speedup"],
        **_ends("speedup", interval(bootstrap([rate], speedup, resamples=resamples)[:, 0])),
        "speedup_quartile_1": spread.get("quartile_1"),
        "speedup_median": spread.get("median"),
        "speedup_quartile_3": spread.get("quartile_3"),
        "tokens_per_s": figures["tokens_per_s"],
        "baseline_tokens_per_s": figures["baseline_tokens_per_s"],
        "acceptance_cumulative": [level["cumulative"] for level in telemetry["by_depth"]],
        "acceptance_conditional": [level["conditional"] for level in telemetry["by_depth"]],
        **costs(figures),
        "calibration_error": telemetry["calibration"]["expected_error"],
        "brier": telemetry["calibration"]["brier"],
        "vocabulary_rejected": figures["draft_vocabulary"]["rejected"],
        "vocabulary_misses": figures["draft_vocabulary"]["misses"],
        "vocabulary_miss_share": figures["draft_vocabulary"]["share"],
        "identical": same["count"],
        "answers": same["of"],
        "same_text_expected": figures["settings"]["same_text_expected"],
        "prompts": figures["prompts"],
        "skipped": len(figures["skipped"]),
        "rounds": figures["rounds"],
        "new_tokens": figures["new_tokens"],
        "drafted_nodes": figures["drafted_nodes"],
        "verified_rows": figures["verified_rows"],
        "decode_s": figures["seconds"]["decode"],
        "baseline_decode_s": figures["seconds"]["baseline_decode"],
        "max_new_tokens": cell["max_new_tokens"],
        **{f"train_{name}": training.get(name) for name in TRAINING},
    }


def costs(figures: Figures) -> dict[str, float | None]:
    """Times per round in units of a plain round of the target (`draft_cost` is the papers' c).

    A round's time is `draft_cost` + `verify_cost` + `other_cost`; the speed-up is tokens per round over it.
    """
    plain_rounds = sum(turn["baseline"]["round_tokens"] for turn in figures["per_prompt"])
    seconds, rounds = figures["seconds"], figures["rounds"]
    if not plain_rounds or not rounds or not figures["time_split"]:
        return dict.fromkeys(("draft_cost", "verify_cost", "other_cost"))
    plain = seconds["baseline_decode"] / plain_rounds
    split = {k: share * seconds["decode"] / rounds / plain for k, share in figures["time_split"].items()}
    draft, verify = split.pop("draft"), split.pop("verify")
    return {"draft_cost": draft, "verify_cost": verify, "other_cost": sum(split.values())}


TRAINING = (
    "steps",
    "supervised_rows",
    "seconds",
    "flops",
    "parameters",
    "peak_memory_mib",
    "store_bytes",
    "simulated_tau",
    "chain_depth",
)


def summary_rows(cells: Sequence[Figures], *, resamples: int) -> list[dict[str, Any]]:
    """One row per drafter and place in the grid, pooled over training seeds, with nested intervals."""
    rows = []
    for place, by_name in _grouped(cells).items():
        for name, members in by_name.items():
            row: dict[str, Any] = {"name": name} | dict(zip(PLACE, place, strict=True))
            row["seeds"] = [one["cell"]["seed"] for one in members]
            for measure in MEASURES:
                table = table_of(members, measure)
                row[measure.name] = _number(pooled(table, measure.statistic))
                drawn = bootstrap([table], measure.statistic, resamples=resamples)[:, 0]
                row |= _ends(measure.name, interval(drawn))
                row[f"{measure.name}_by_seed"] = [_number(pooled(one[None], measure.statistic)) for one in table]
            row["identical"] = sum(one["identical"]["count"] for one in members)
            row["answers"] = sum(one["identical"]["of"] for one in members)
            row["same_text_expected"] = all(one["settings"]["same_text_expected"] for one in members)
            row["prompts"] = members[0]["prompts"] - len(members[0]["skipped"])
            rows.append(row)
    return rows


def contrasts(cells: Sequence[Figures], *, resamples: int) -> list[dict[str, Any]]:
    """Every pair of drafters at every place: paired difference, interval, p, Holm's p and the verdict.

    A family of Holm's correction is one table of contrasts: one measure, one suite, one batch.
    """
    rows = []
    for place, by_name in _grouped(cells).items():
        for (other, first), measure in itertools.product(itertools.combinations(by_name, 2), MEASURES):
            one, two = (table_of(by_name[name], measure) for name in (first, other))
            found = contrast(one, two, measure.statistic, resamples=resamples)
            row = {"measure": measure.name, "one": first, "other": other} | dict(zip(PLACE, place, strict=True))
            row |= {
                "difference": found.difference,
                **_ends("difference", found.interval),
                "p": found.p,
                "prompts": one.shape[1],
                "seeds": [len(one), len(two)],
            }
            rows.append(row)
    families: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        families[row["measure"], row["suite"], row["batch"]].append(row)
    for family in families.values():
        for row, p in zip(family, holm([row["p"] for row in family]), strict=True):
            ends = None if row["difference_low"] is None else [row["difference_low"], row["difference_high"]]
            row |= {"p_holm": p, "tests": len(family), "verdict": verdict(ends, p)}
    return rows


def _grouped(cells: Sequence[Figures]) -> dict[tuple[Any, ...], dict[str, list[Figures]]]:
    """Place -> name -> cells, one per seed, all in their order."""
    groups: dict[tuple[Any, ...], dict[str, list[Figures]]] = {}
    for figures in cells:
        cell = figures["cell"]
        place = tuple(cell[k] for k in PLACE)
        groups.setdefault(place, {}).setdefault(cell["name"], []).append(figures)
    return groups


def _ends(name: str, ends: Sequence[float] | None) -> dict[str, float | None]:
    return {f"{name}_low": _end(ends, 0), f"{name}_high": _end(ends, 1)}


def _end(ends: Sequence[float] | None, place: int) -> float | None:
    return None if ends is None else ends[place]


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
