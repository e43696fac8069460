"""Intervals that cover, tests that keep their level and have power, corrections by hand."""

import itertools

import numpy as np
import pytest

from eaglelab.comparison.statistics import (
    bootstrap,
    contrast,
    holm,
    interval,
    pooled,
    speedup,
    swap_test,
    tau,
    verdict,
)
from eaglelab.evaluation.metrics import Timing, TurnRecord, summarize, tau_interval

P = 40


def answers(random, *, gain=0.0, prompts=P, difficulty=None, seeds=1):
    """Accepted tokens and rounds of drafters whose acceptance depends on the prompt: float64 [S, P, 2]."""
    difficulty = random.normal(size=prompts) if difficulty is None else difficulty
    rounds = random.integers(10, 40, size=(seeds, prompts))
    mean = np.clip(2 + difficulty + gain, 0, None)
    return np.stack([random.poisson(mean * rounds), rounds], axis=-1).astype(float)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Truth: the ratio of expectations, from a hundred thousand prompts."""
    truth = pooled(answers(np.random.default_rng(9), prompts=100_000), tau)
    covered = 0
    for trial in range(400):
        ends = interval(bootstrap([answers(np.random.default_rng(trial))], tau, resamples=500)[:, 0])
        covered += ends[0] <= truth <= ends[1]
    assert 0.91 <= covered / 400 <= 0.98


def test_the_paired_interval_covers_the_truth_and_is_narrower_than_an_unpaired_one():
    covered, widths = 0, []
    many = np.random.default_rng(9).normal(size=100_000)
    one, two = (
        answers(np.random.default_rng(k), gain=g, prompts=100_000, difficulty=many) for k, g in ((1, 0.3), (2, 0))
    )
    truth = pooled(one, tau) - pooled(two, tau)
    for trial in range(300):
        random = np.random.default_rng(trial)
        difficulty = random.normal(size=P)
        one, two = answers(random, gain=0.3, difficulty=difficulty), answers(random, difficulty=difficulty)
        drawn = bootstrap([one, two], tau, resamples=400)
        low, high = interval(drawn[:, 0] - drawn[:, 1])
        covered += low <= truth <= high
        apart = bootstrap([one], tau, resamples=400) - bootstrap([two], tau, resamples=400, seed=1)
        widths.append((high - low) / np.diff(interval(apart[:, 0]))[0])
    assert 0.90 <= covered / 300 <= 0.98
    assert np.mean(widths) < 0.5


def test_the_bootstrap_is_that_of_drawn_prompts():
    """Against the evaluation's own interval, which draws indices."""
    table = answers(np.random.default_rng(0))
    plain = Timing(1, 1.0, 0.0)
    turns = [
        TurnRecord(
            str(p), 1, "", 1, 1, "eos", [0] * (int(rounds) - 1) + [int(accepted)], 0, 0, 0, 0, 0, 0, plain, plain, True
        )
        for p, (accepted, rounds) in enumerate(table[0])
    ]
    assert pooled(table, tau) == pytest.approx(summarize(turns)["tau"])
    ours = interval(bootstrap([table], tau)[:, 0])
    assert ours == pytest.approx(tau_interval(turns), abs=0.03)


def test_training_seeds_are_nested_in_the_resamples():
    """Seeds that differ widen the interval; one table of equal seeds gives that of one seed."""
    random = np.random.default_rng(0)
    difficulty = random.normal(size=P)
    one = answers(random, difficulty=difficulty)
    same = np.concatenate([one, one, one])
    apart = np.concatenate([one, answers(random, gain=1.0, difficulty=difficulty)])
    widths = [np.diff(interval(bootstrap([table], tau)[:, 0]))[0] for table in (one, same, apart)]
    assert widths[1] == pytest.approx(widths[0], rel=0.05)
    assert widths[2] > 1.3 * widths[0]


def test_p_is_uniform_when_nothing_differs_and_small_when_something_does():
    """Two drafters of one law on the same prompts; a gain of 0.5 is found nearly always."""
    null, found = [], 0
    for trial in range(400):
        random = np.random.default_rng(trial)
        difficulty = random.normal(size=P)
        one, two = answers(random, difficulty=difficulty), answers(random, difficulty=difficulty)
        null.append(swap_test(one, two, tau, resamples=300))
        if trial < 50:
            better = answers(random, gain=0.5, difficulty=difficulty)
            found += swap_test(better, two, tau, resamples=300) < 0.05
    null = np.array(null)
    for level in (0.05, 0.25, 0.5, 0.75):
        assert np.mean(null <= level) == pytest.approx(level, abs=3.5 * np.sqrt(level * (1 - level) / 400))
    assert found >= 48


def test_few_prompts_are_swapped_in_every_way():
    random = np.random.default_rng(3)
    one, two = answers(random, prompts=6, gain=0.5), answers(random, prompts=6)
    seen = abs(pooled(one, tau) - pooled(two, tau))
    gaps = []
    for swaps in itertools.product([False, True], repeat=6):
        first = np.where(np.array(swaps)[:, None], two[0], one[0])
        second = np.where(np.array(swaps)[:, None], one[0], two[0])
        gaps.append(abs(tau(first.sum(0)) - tau(second.sum(0))))
    assert swap_test(one, two, tau) == np.mean(np.array(gaps) >= seen - 1e-9)


def test_equal_drafters_are_never_told_apart():
    table = answers(np.random.default_rng(0))
    found = contrast(table, table, tau, resamples=200)
    assert (found.difference, found.interval, found.p) == (0, [0, 0], 1)
    assert verdict(found.interval, found.p) == "no difference shown"


def test_speedup_is_a_ratio_of_total_rates():
    table = np.array([[[30, 1.0, 10, 1.0], [90, 2.0, 30, 3.0]]])  # tokens, seconds with; tokens, seconds without
    assert pooled(table, speedup) == pytest.approx((120 / 3) / (40 / 4))


def test_what_has_no_value_says_so():
    empty = np.zeros((1, 4, 2))
    assert interval(bootstrap([empty], tau, resamples=100)[:, 0]) is None
    assert contrast(empty, empty, tau, resamples=100).difference is None
    assert verdict(None, None) == "no data"


def test_holm_by_hand():
    """Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, then 0.04 x 1, which may not fall below its predecessor."""
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx(
        [0.03, 0.06, None, 0.06, 0.02], abs=1e-12, nan_ok=True
    )
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []


def test_a_verdict_needs_interval_and_test():
    assert verdict([0.1, 0.3], 0.01) == "higher"
    assert verdict([-0.3, -0.1], 0.01) == "lower"
    assert verdict([-0.1, 0.3], 0.01) == "no difference shown"
    assert verdict([0.1, 0.3], 0.2) == "no difference shown"


def test_tables_of_different_prompts_are_refused():
    random = np.random.default_rng(0)
    with pytest.raises(ValueError, match="cannot be paired"):
        bootstrap([answers(random), answers(random, prompts=3)], tau)
    with pytest.raises(ValueError, match="same prompts"):
        swap_test(answers(random), answers(random, prompts=3), tau)
