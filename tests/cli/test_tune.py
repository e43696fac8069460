"""`eaglelab tune` and `eaglelab bench decoding` as a user runs them, on a run of a few steps."""

import json

import pytest

from tests.cli.conftest import run

SMALL = ["limit=2", "measure=1", "max_new_tokens=8", "repetitions=1", "widths=[1,2]", "depth=2", "budgets=[2,4]"]


def test_tune_names_a_tree_that_evaluate_takes(trained, tmp_path):
    done = run("tune", f"run={trained}", *SMALL, "floors=[0,0.1]", "out=new/tuning.json", cwd=tmp_path)
    figures = json.loads((tmp_path / "new" / "tuning.json").read_text())
    assert f"use: {figures['overrides']}" in done.stdout
    assert figures["predictions"][0] == figures["best"]
    assert figures["recorded"]["answers"] == 2
    assert len(figures["measured"]["default"]["speedup"]["values"]) == 1
    arguments = [*figures["overrides"].split(), "limit=1", "max_new_tokens=8"]
    assert "tau" in run("evaluate", f"run={trained}", *arguments, cwd=tmp_path).stdout


def test_bench_decoding_prints_and_saves_ratios(trained, tmp_path):
    arguments = [
        "limit=1",
        "max_new_tokens=6",
        "repetitions=2",
        "trees=[{name: dynamic, width: 2, depth: 2, budget: 3}]",
    ]
    arguments += ["batch.size=2", "batch.prompts=2", "out=speed.json"]
    done = run("bench", "decoding", f"run={trained}", *arguments, cwd=tmp_path)
    figures = json.loads((tmp_path / "speed.json").read_text())
    assert "plain decoding over model.generate" in done.stdout
    assert "batch 2 over batch 1" in done.stdout
    (tree,) = figures["trees"].values()
    assert tree["tree"]["budget"] == 3
    for part in (tree["speedup"], figures["plain"]["over_generate"], figures["batches"]["2"]["speedup"]):
        assert len(part["values"]) == 2
        assert part["quartile_1"] <= part["median"] <= part["quartile_3"]
    assert tree["target"]["median"] + tree["drafter"]["median"] + tree["overhead"]["median"] == pytest.approx(
        1, abs=0.3
    )
    assert 0 < figures["plain"]["overhead"]["median"] < 1
