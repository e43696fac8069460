"""What is read from a comparison's folder: pools against independent sums, intervals, training curves."""

import csv
import json

import numpy as np
import pytest

from eaglelab.evaluation import read_records, summarize_rounds
from eaglelab.report.comparison import Comparison, Point, Training
from eaglelab.report.pooling import Pool


@pytest.fixture(scope="module")
def comparison(measured):
    return Comparison(measured)


def test_what_was_measured(comparison):
    assert comparison.names == ["plain", "sharp"]
    assert comparison.suites == ["gsm8k", "chat & <b>more"]
    assert (comparison.trees, comparison.temperatures) == (["dynamic"], [0.0])
    assert (comparison.batches, comparison.seeds) == ([1, 2], [0, 1])
    assert [(one.name, one.seed) for one in comparison.trainings] == [("plain", 0), ("plain", 1), ("sharp", 0)]


def test_a_pool_is_the_summary_of_all_its_rounds(comparison):
    pool = comparison.pool(name="plain", batch=2)
    assert len(pool.cells) == 4
    records = [record for cell in pool.cells for record in read_records(cell["folder"] / "rounds.parquet")]
    decode_s = sum(cell["seconds"]["decode"] for cell in pool.cells)
    whole = summarize_rounds(records, decode_s=decode_s)
    assert pool.tau == pytest.approx(whole["tau"])
    assert pool.rounds == whole["rounds"]
    for level, row in zip(pool.levels, whole["by_depth"], strict=True):
        assert (level.depth, level.cumulative) == (row["depth"], pytest.approx(row["cumulative"]))
        assert level.conditional == pytest.approx(row["conditional"])
    filled = [row for row in whole["calibration"]["reliability"] if row["nodes"]]
    for one, row in zip(pool.bins, filled, strict=True):
        assert one.nodes == row["nodes"]
        assert one.confidence == pytest.approx(row["confidence"])
        assert one.acceptance == pytest.approx(row["acceptance"])
        assert one.interval == pytest.approx(row["interval"])
    assert pool.expected_error == pytest.approx(whole["calibration"]["expected_error"])
    for phase, milliseconds in pool.phases_ms.items():
        assert milliseconds == pytest.approx(1000 * whole["time"]["seconds"][phase] / whole["rounds"], abs=1e-9)
    round_ms, tokens = sum(pool.phases_ms.values()), whole["tokens"] / whole["rounds"]
    assert pool.speedup == pytest.approx(tokens * pool.plain_ms / round_ms)


def test_nothing_to_pool():
    pool = Pool([])
    assert pool.tau is pool.speedup is pool.plain_ms is pool.phases_ms is pool.expected_error is None
    assert pool.cost("draft") is None
    assert pool.levels == pool.bins == []


def test_intervals(comparison):
    row = comparison.results["summary"][0]
    labels = {key: row[key] for key in ("name", "suite", "tree", "temperature", "batch")}
    assert comparison.interval("tau", **labels) == (row["tau_low"], row["tau_high"])
    del labels["suite"]  # of both tasks together: drawn here
    low, high = comparison.interval("tau", **labels)
    assert low <= comparison.pool(**labels).tau <= high
    labels["name"] = "sharp"  # one seed: prompts alone
    turns = [turn["accepted"] for turn in comparison.pool(**labels).turns()]
    sums = np.array([[sum(accepted), len(accepted)] for accepted in turns])
    drawn = sums[np.random.default_rng(3).integers(len(sums), size=(4000, len(sums)))].sum(1)
    ends = np.quantile(1 + drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    assert comparison.interval("tau", **labels) == pytest.approx(ends, abs=0.1)


def test_a_curve_between_logged_lines(comparison):
    first = comparison.trainings[0]
    assert first.curve == [
        Point(10, 1.5, pytest.approx(300), pytest.approx(20)),
        Point(20, 2.0, pytest.approx(600), pytest.approx(40)),
    ]
    assert not first.exact_seconds
    assert first.simulated_tau == 2.0


def test_a_curve_with_seconds_of_its_own(tmp_path):
    (tmp_path / "csv" / "version_0").mkdir(parents=True)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, ["step", "train/seconds", "val/tau"])
        lines.writeheader()
        lines.writerows([{"step": 9, "train/seconds": 5}, {"step": 9, "val/tau": 1.5}, {"step": 19, "val/tau": 1.75}])
    training = Training.read("a", 0, tmp_path)
    assert training.exact_seconds
    assert training.curve == [Point(10, 1.5, None, 5.0), Point(20, 1.75, None, 10.0)]


def test_an_imported_drafter_has_no_training(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"variant": "eagle"}))
    training = Training.read("imported", 0, tmp_path)
    assert training.curve == []
    assert training.figures == {}
    assert training.simulated_tau is None


def test_cells_without_rounds_or_telemetry(comparison):
    """A pool of old cells, or of answers that ended at once, has no figures rather than wrong ones."""
    cell = dict(comparison.cells[0])
    del cell["telemetry"]
    levels = Pool([cell]).levels
    assert all(level.conditional is None for level in levels)
    assert 1 + sum(level.cumulative for level in levels) == pytest.approx(cell["tau"])
    empty = {**cell, "rounds": 0, "accepted_by_depth_rounds": [], "per_prompt": [], "time_split": None}
    assert Pool([empty]).tau is None
    assert np.isfinite(Pool([empty, cell]).tau)
