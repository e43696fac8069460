"""Metrics from hand-written records: every number below was worked out on paper."""

import json
from dataclasses import replace

import numpy as np
import pytest

from eaglelab.evaluation import table
from eaglelab.evaluation.evaluate import EvaluationResult
from eaglelab.evaluation.metrics import Timing, TurnRecord, summarize, tau_interval


def record(accepted, speculative, baseline, *, identical=True, category="", generate=None, tail=1):
    """`tail`: tokens of the last round beyond its accepted ones (0: it ended on a draft token)."""
    tokens = sum(accepted) + len(accepted) - 1 + tail
    return TurnRecord(
        id="q",
        turn=1,
        category=category,
        prompt_tokens=10,
        new_tokens=tokens + 1,
        stop_reason="eos",
        accepted=accepted,
        drafted=5 * len(accepted),
        verified=6 * len(accepted),
        draft_s=0.25 * speculative,
        pack_s=0.0625 * speculative,
        verify_s=0.5 * speculative,
        commit_s=0.125 * speculative,
        speculative=Timing(tokens, speculative, 0.1),
        baseline=Timing(tokens, baseline, 0.05),
        identical=identical,
        identical_to_generate=generate,
    )


LONG = record([3, 0, 5, 2], 2.0, 7.0, category="math")  # 14 tokens: 7/s against 2/s
SHORT = record([1], 1.0, 1.0, identical=False, category="qa", tail=0)  # 1 token


def test_tau_averages_over_all_rounds_not_over_prompts():
    summary = summarize([LONG, SHORT])
    assert summary["rounds"] == 5
    assert summary["tau"] == pytest.approx((4 + 1 + 6 + 3 + 2) / 5)
    assert summary["tau"] != pytest.approx(((4 + 1 + 6 + 3) / 4 + 2) / 2)


def test_depth_shares_add_up_to_tau():
    summary = summarize([LONG, SHORT])
    assert summary["accepted_by_depth_rounds"] == [4, 3, 2, 1, 1]
    assert summary["accepted_by_depth"] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])
    assert 1 + sum(summary["accepted_by_depth"]) == pytest.approx(summary["tau"])


def test_speed_is_a_ratio_of_totals():
    summary = summarize([LONG, SHORT])
    assert summary["tokens_per_s"] == pytest.approx(15 / 3)
    assert summary["baseline_tokens_per_s"] == pytest.approx(15 / 8)
    assert summary["speedup"] == pytest.approx(8 / 3)
    assert summary["speedup_spread"] == pytest.approx({"quartile_1": 1.625, "median": 2.25, "quartile_3": 2.875})
    assert summary["tokens_per_round"] == pytest.approx(3.0)  # tau is 3.2
    assert summary["identical"] == {"count": 1, "of": 2}
    assert "identical_to_generate" not in summary
    assert summary["time_split"] == pytest.approx(
        {"draft": 0.25, "pack": 0.0625, "verify": 0.5, "commit": 0.125, "other": 0.0625}
    )
    assert summary["seconds"]["prefill"] == pytest.approx(0.2)


def test_answers_without_rounds_have_no_rates():
    """An end token straight from the prefill."""
    nothing = record([], 0.0, 0.0)
    summary = summarize([nothing])
    for key in ("tau", "tokens_per_s", "speedup", "speedup_spread", "time_split"):
        assert summary[key] is None
    assert summary["accepted_by_depth"] == []
    assert "nothing" not in as_table([nothing])
    both = summarize([nothing, LONG])
    assert both["tau"] == pytest.approx(3.5)
    assert both["speedup"] == pytest.approx(3.5)
    assert both["speedup_spread"]["median"] == pytest.approx(3.5)


def test_generate_check_counts_only_what_was_checked():
    turns = [record([1], 1, 1, generate=True), record([1], 1, 1, generate=False), LONG]
    assert summarize(turns)["identical_to_generate"] == {"count": 1, "of": 2}


def as_dict(turns, **changes):
    settings = {
        "temperature": 0.0,
        "batch": 1,
        "same_text_expected": True,
        "tree": {"name": "static"},
        "target": "bundled",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
    }
    return EvaluationResult(turns, settings, {"torch": "2"}, len(turns), **changes).to_dict()


def as_table(turns, **changes):
    return table(as_dict(turns, **changes))


def test_table_fits_and_says_what_it_shows():
    text = as_table([LONG, SHORT])
    assert max(map(len, text.splitlines())) <= 80
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert lines["tau"].split()[1] == "3.20"
    assert lines["speed-up"].split()[1] == "2.67x"
    assert "1 of 2" in lines["identical"]
    assert lines["math"].split() == ["math", "1", "3.50", "3.50x", "1", "of", "1"]
    assert lines["qa"].split() == ["qa", "1", "2.00", "1.00x", "0", "of", "1"]
    assert "PARTIAL" not in text
    assert "PARTIAL" in as_table([LONG], partial=True)
    assert "PARTIAL" in as_table([], partial=True)
    assert "skipped" in as_table([LONG], skipped=[("7", "too long")])


def test_table_survives_the_trip_through_json():
    metrics = as_dict([LONG, SHORT])
    assert table(json.loads(json.dumps(metrics))) == table(metrics)
    assert metrics["per_prompt"][0]["speedup"] == pytest.approx(3.5)
    assert metrics["per_prompt"][0]["rounds"] == 4


def test_tau_interval_covers_the_true_tau_at_its_level():
    """Coverage of the bootstrap over 300 simulated evaluations: 95 % +- what 60 prompts and chance allow."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        turns = []
        for prompt in range(60):
            easy = generator.beta(4, 2)  # acceptance differs between prompts
            accepted = generator.binomial(5, easy, size=20).tolist()
            turns.append(replace(record(accepted, 1.0, 1.0), id=str(prompt)))
        low, high = tau_interval(turns, resamples=400)
        covered += low <= 1 + 5 * 4 / 6 <= high
    assert 0.90 <= covered / 300 <= 0.985


def test_tau_interval_resamples_prompts_not_rounds():
    """Rounds of one prompt that are all alike must not narrow the interval."""
    few = [replace(record([i % 2 * 4] * 2, 1.0, 1.0), id=str(i)) for i in range(20)]
    many = [replace(record([i % 2 * 4] * 200, 1.0, 1.0), id=str(i)) for i in range(20)]
    assert tau_interval(few) == tau_interval(many)
    assert tau_interval([]) is None


def test_tau_over_ended_answers_leaves_out_those_cut_at_the_limit():
    looping = replace(record([5, 5, 5], 1.0, 1.0), id="loop", stop_reason="length")
    summary = summarize([LONG, looping])
    assert summary["tau_ended"] == pytest.approx((4 + 1 + 6 + 3) / 4)
    assert summary["answers_ended"] == 1
    assert summary["tau"] == pytest.approx((14 + 18) / 7)
    assert summarize([looping])["tau_ended"] is None
