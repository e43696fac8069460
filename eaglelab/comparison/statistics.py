"""Intervals and paired tests over prompts.

A *table* holds what one drafter did: float64 [S, P, C], S training seeds, P prompts, C sums (accepted draft tokens,
rounds, ...). Prompts are the unit: the rounds of one answer are alike, so they are never resampled on their own. A
*statistic* turns sums [..., C] into values [...], such as tau or the speed-up: ratios of pooled sums, not means of
ratios. All draws are seeded, so that equal tables give equal numbers.

Letters: S training seeds, P prompts, C sums, N resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]

RESAMPLES = 10_000
LEVEL = 0.95


def tau(sums: Array) -> Array:
    """1 + accepted / rounds; C = 2 sums: accepted, rounds. NaN without a round."""
    return 1 + _ratio(sums[..., 0], sums[..., 1])


def speedup(sums: Array) -> Array:
    """Ratio of the two rates; C = 4 sums: tokens and seconds with the drafter, tokens and seconds without."""
    return _ratio(sums[..., 0] * sums[..., 3], sums[..., 1] * sums[..., 2])


def _ratio(value: Array, by: Array) -> Array:
    return np.divide(value, by, out=np.full_like(value, np.nan), where=by != 0)


def pooled(table: Array, statistic: Statistic) -> float:
    """The statistic of all seeds and prompts together."""
    return float(statistic(table.sum((0, 1))))


def bootstrap(tables: Sequence[Array], statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0) -> Array:
    """The statistic of each table, [N, tables], over resamples of prompts and, nested in them, of training seeds.

    Prompts are drawn with replacement, the same ones for every table: differences of columns are paired. Seeds are
    drawn with replacement for each table on its own; one seed is always drawn, so a table of a single training says
    nothing about other trainings, and two or three seeds understate how much trainings differ.

    Raises:
        ValueError: tables of different prompts.
    """
    prompts = {table.shape[1] for table in tables}
    if len(prompts) != 1:
        raise ValueError(
            f"tables of {sorted(prompts)} prompts cannot be paired: evaluate all drafters on the same ones"
        )
    random = np.random.default_rng(seed)
    (P,) = prompts
    times_NP = random.multinomial(P, np.full(P, 1 / P), size=resamples).astype(np.float64)
    values = []
    for table in tables:
        S = len(table)
        times_NS = random.multinomial(S, np.full(S, 1 / S), size=resamples).astype(np.float64)
        sums_NC = np.einsum("ns,snc->nc", times_NS, np.stack([times_NP @ one for one in table]))
        values.append(statistic(sums_NC))
    return np.stack(values, axis=1)


def interval(values: Array, *, level: float = LEVEL) -> list[float] | None:
    """Percentile interval [low, high]; None where a resample has no value."""
    if not np.isfinite(values).all():
        return None
    tail = (1 - level) / 2
    return [float(x) for x in np.quantile(values, [tail, 1 - tail])]


def swap_test(
    one: Array, other: Array, statistic: Statistic, *, resamples: int = RESAMPLES, seed: int = 0
) -> float | None:
    """Two-sided p-value of the difference of two tables, by swapping them prompt by prompt.

    If the two drafters were alike, which of them did what to a prompt would be a coin toss: the tables' rows (means
    over seeds) are swapped at random, and p is the share of such draws whose difference is at least as far from 0 as
    the one seen, that one counted in. Up to 2^P = `resamples` all swaps are taken, and p is exact. The test is about
    these prompts and these trainings, whatever the number of seeds. None where the statistic has no value.

    Raises:
        ValueError: tables of different prompts.
    """
    if one.shape[1:] != other.shape[1:]:
        raise ValueError("the two tables must hold the same prompts and sums: evaluate both on the same suite")
    first_PC, second_PC = one.mean(0), other.mean(0)
    P = len(first_PC)
    if resamples >= 2**P:
        swap_NP = (np.arange(2**P)[:, None] >> np.arange(P)) & 1
    else:
        swap_NP = np.random.default_rng(seed).integers(2, size=(resamples, P))
    swap = swap_NP.astype(np.float64)
    total_C, gap_PC = first_PC.sum(0), second_PC - first_PC
    moved_NC = swap @ gap_PC
    drawn_N = statistic(total_C + moved_NC) - statistic(second_PC.sum(0) - moved_NC)
    seen = statistic(total_C) - statistic(second_PC.sum(0))
    if not np.isfinite(drawn_N).all() or not np.isfinite(seen):
        return None
    as_far = np.count_nonzero(np.abs(drawn_N) >= abs(seen) * (1 - 1e-9) - 1e-12)
    return float(as_far / len(drawn_N)) if resamples >= 2**P else float((as_far + 1) / (len(drawn_N) + 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction of one family of tests; None stays None and does not count. (Holm 1979.)"""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        corrected[place] = largest
    return corrected


@dataclass(frozen=True)
class Contrast:
    """The paired difference of one statistic between two drafters, `one - other`."""

    difference: float | None
    interval: list[float] | None
    p: float | None


def contrast(one: Array, other: Array, statistic: Statistic, *, resamples: int = RESAMPLES) -> Contrast:
    """Difference, paired bootstrap interval and swap test of two tables of the same prompts."""
    drawn = bootstrap([one, other], statistic, resamples=resamples)
    difference = pooled(one, statistic) - pooled(other, statistic)
    return Contrast(
        difference if np.isfinite(difference) else None,
        interval(drawn[:, 0] - drawn[:, 1]),
        swap_test(one, other, statistic, resamples=resamples),
    )


def verdict(ends: Sequence[float] | None, p: float | None, *, level: float = LEVEL) -> str:
    """`higher` or `lower`, or `no difference shown`: when the interval holds 0, or the corrected p does not go below
    1 - level; `no data` without an interval."""
    if ends is None or p is None:
        return "no data"
    low, high = ends
    if low <= 0 <= high or p > 1 - level:
        return "no difference shown"
    return "higher" if low > 0 else "lower"
