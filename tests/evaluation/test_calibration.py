"""Calibration from identities that hold whatever the drafter."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_calibration_error

from eaglelab.evaluation.calibration import Calibration, by_depth, merge, wilson


def nodes(count: int, seed: int = 0, shift: float = 0.0):
    """Confidence, and acceptance whose true rate is `confidence - shift`."""
    random = np.random.default_rng(seed)
    confidence = random.uniform(max(shift, 0), 1, count)
    return confidence, random.random(count) < confidence - shift, random.integers(1, 6, count)


def exactly(share: float, confidence: float, count: int = 100):
    """`count` nodes of one confidence of which exactly `share` is accepted."""
    return np.full(count, confidence), np.arange(count) < round(share * count)


def test_calibrated_nodes_have_no_error_beyond_sampling():
    confidence, accepted, _ = nodes(200_000)
    table = Calibration.of(confidence, accepted)
    assert table.expected_error < 0.005  # ten bins of 20 000: a standard error of 0.003 or less each
    # E[(p - a)^2] = E[p (1 - p)] = 1/6 for p uniform and calibrated
    assert table.brier == pytest.approx(1 / 6, abs=0.003)
    inside = [row["interval"][0] <= row["confidence"] <= row["interval"][1] for row in table.rows(level=0.999)]
    assert all(inside)


@pytest.mark.parametrize("shift", [0.05, 0.2, -0.1])
def test_a_constant_shift_is_the_error(shift):
    parts = [exactly(share, share + shift) for share in (0.12, 0.35, 0.61, 0.74)]
    confidence, accepted = map(np.concatenate, zip(*parts))
    assert Calibration.of(confidence, accepted).expected_error == pytest.approx(abs(shift))
    assert Calibration.of(confidence, accepted, bins=37).expected_error == pytest.approx(abs(shift))


def test_a_shift_of_sampled_nodes():
    confidence, accepted, _ = nodes(200_000, shift=0.1)
    assert Calibration.of(confidence, accepted).expected_error == pytest.approx(0.1, abs=0.005)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_against_torchmetrics(bins):
    confidence, accepted, _ = nodes(3000, seed=1, shift=0.2)
    single = confidence.astype(np.float32)
    reference = binary_calibration_error(torch.tensor(single), torch.tensor(accepted), n_bins=bins)
    assert Calibration.of(single, accepted, bins=bins).expected_error == pytest.approx(float(reference), abs=1e-5)


def test_one_bin_compares_the_means():
    confidence, accepted, _ = nodes(500, shift=0.3)
    table = Calibration.of(confidence, accepted, bins=1)
    assert table.expected_error == pytest.approx(abs(confidence.mean() - accepted.mean()))
    assert table.confidence == pytest.approx(confidence.mean())
    assert table.acceptance == accepted.mean()
    assert table.brier == pytest.approx(np.mean((confidence - accepted) ** 2))


def test_more_bins_never_show_less_error():
    """Halving a bin splits its gap, and |a| + |b| >= |a + b|."""
    confidence, accepted, _ = nodes(1000, seed=2)
    errors = [Calibration.of(confidence, accepted, bins=bins).expected_error for bins in (1, 2, 4, 8, 16, 32)]
    assert errors == sorted(errors)


def test_bins_are_half_open_and_the_last_is_closed():
    table = Calibration.of([0.0, 0.25, 0.2499999, 0.5, 1.0, 1.0], [0, 1, 0, 1, 1, 0], bins=4)
    assert table.count_K.tolist() == [2, 1, 1, 2]
    assert table.accepted_K.tolist() == [0, 1, 1, 1]
    row = table.rows()[3]
    assert (row["low"], row["high"], row["nodes"], row["confidence"], row["acceptance"]) == (0.75, 1.0, 2, 1.0, 0.5)


def test_parts_add_up_to_the_whole_and_never_lose_nodes():
    confidence, accepted, depth = nodes(1000, seed=3)
    cuts = [0, 1, 1, 50, 400, 1000]
    parts = [Calibration.of(confidence[a:b], accepted[a:b]) for a, b in pairwise(cuts)]
    running, whole = Calibration.empty(), Calibration.of(confidence, accepted)
    for part in parts:
        grown = running + part
        assert (grown.count_K >= running.count_K).all()
        assert (grown.accepted_K >= running.accepted_K).all()
        running = grown
    for total in (running, merge(parts), merge(reversed(parts)), merge(by_depth(confidence, accepted, depth).values())):
        assert (total.count_K == whole.count_K).all()
        assert (total.accepted_K == whole.accepted_K).all()
        assert total.expected_error == pytest.approx(whole.expected_error)
        assert total.brier == pytest.approx(whole.brier)


def test_by_depth_keeps_levels_apart():
    confidence, accepted, depth = nodes(1000, seed=4)
    tables = by_depth(confidence, accepted, depth, bins=5)
    assert list(tables) == [1, 2, 3, 4, 5]
    for level, table in tables.items():
        here = depth == level
        assert table.nodes == here.sum()
        assert table.acceptance == pytest.approx(accepted[here].mean())
        assert table.bins == 5


def test_no_nodes_give_a_clear_result():
    for table in (Calibration.empty(4), Calibration.of([], [], bins=4), merge([], bins=4)):
        assert table.nodes == 0
        assert table.expected_error is table.brier is table.confidence is table.acceptance is None
        assert [row["nodes"] for row in table.rows()] == [0] * 4
        assert {row["interval"] for row in table.rows()} == {None}
        assert json.loads(json.dumps(table.to_dict())) == table.to_dict()
    assert by_depth([], [], []) == {}
    with pytest.raises(ValueError, match="at least one bin"):
        Calibration.empty(0)


def test_wilson_interval():
    low, high = wilson([0, 5, 10, 0], [10, 10, 10, 0])
    # 5 of 10 and 0 of 10 at z = 1.96: Brown, Cai and DasGupta 2001, and by hand z^2 / (n + z^2) = 0.2775
    assert low == pytest.approx([0.0, 0.2366, 0.7225, 0.0], abs=1e-4)
    assert high == pytest.approx([0.2775, 0.7634, 1.0, 1.0], abs=1e-4)
    narrow, wide = wilson([5], [10], level=0.5), wilson([5], [10], level=0.999)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_wilson_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    for share in (0.02, 0.3, 0.9):
        low, high = wilson(random.binomial(50, share, 20_000), np.full(20_000, 50))
        assert np.mean((low <= share) & (share <= high)) == pytest.approx(0.95, abs=0.035)


def test_a_probability_a_rounding_above_one_is_one():
    confidence = np.float32(1) + np.finfo(np.float32).eps
    table = Calibration.of([confidence], [1])
    assert table.confidence == 1.0
    assert table.brier == 0.0


@pytest.mark.parametrize(
    ("confidence", "accepted", "complaint"),
    [
        ([0.5], [0, 1], "1 confidences but 2 outcomes"),
        ([-0.7], [1], "-0.7 is no probability"),
        ([1.1], [1], "1.1 is no probability"),
        ([float("nan")], [1], "nan is no probability"),
        ([0.5], [2], "other than 0 and 1"),
        ([0.5], [float("nan")], "other than 0 and 1"),
    ],
)
def test_wrong_input(confidence, accepted, complaint):
    with pytest.raises(ValueError, match=complaint):
        Calibration.of(confidence, accepted)


def test_tables_of_other_bins_and_missing_depths():
    with pytest.raises(ValueError, match="4 and 5 bins"):
        merge([Calibration.empty(4), Calibration.empty(5)])
    with pytest.raises(ValueError, match="2 confidences but 1 depths"):
        by_depth([0.1, 0.2], [0, 1], [1])
