"""Numbers of cells, by oracles: costs, tables over prompts, vocabulary misses, contrasts of scripted drafters."""

import numpy as np
import pytest

from eaglelab.comparison.results import MEASURES, contrasts, costs, summary_rows, table_of
from eaglelab.comparison.statistics import pooled
from eaglelab.evaluation.metrics import Timing, TurnRecord, summarize
from eaglelab.evaluation.vocabulary import VocabularyMisses
from tests.comparison.conftest import EAGLE3

TAU, SPEEDUP = MEASURES


def turn(name, accepted, *, seconds=1.0, plain=2.0, number=1, **phases):
    """An answer whose rounds published every accepted token and one more."""
    tokens = sum(accepted) + len(accepted)
    return TurnRecord(
        id=name,
        turn=number,
        category="",
        prompt_tokens=5,
        new_tokens=tokens + 1,
        stop_reason="eos",
        accepted=accepted,
        drafted=5 * len(accepted),
        verified=6 * len(accepted),
        **{"draft_s": 0.0, "pack_s": 0.0, "verify_s": 0.0, "commit_s": 0.0} | phases,
        speculative=Timing(tokens, seconds, 0.1),
        baseline=Timing(tokens, plain, 0.1),
        identical=True,
    )


def cell(name, turns, *, seed=0, tree="chain", batch=1, suite="qa"):
    return {
        **summarize(turns),
        "per_prompt": [one.to_dict() for one in turns],
        "prompts": len({one.id for one in turns}),
        "skipped": [],
        "settings": {"same_text_expected": True},
        "cell": {"name": name, "seed": seed, "suite": suite, "tree": tree, "temperature": 0.0, "batch": batch},
    }


def test_turns_of_a_prompt_are_one_unit():
    figures = cell("a", [turn("q1", [2, 0]), turn("q2", [1]), turn("q1", [3], number=2)])
    assert table_of([figures], TAU).tolist() == [[[5, 3], [1, 1]]]
    assert pooled(table_of([figures], TAU), TAU.statistic) == figures["tau"]
    assert pooled(table_of([figures], SPEEDUP), SPEEDUP.statistic) == pytest.approx(figures["speedup"])


def test_seeds_of_different_prompts_are_refused():
    with pytest.raises(ValueError, match="different prompts"):
        table_of([cell("a", [turn("q1", [1])]), cell("a", [turn("q2", [1])], seed=1)], TAU)


def test_costs_are_in_units_of_a_plain_round():
    """10 tokens in 2 rounds: plain 2 s, so 0.2 s a round; with the drafter 0.5 s a round."""
    figures = cell(
        "a", [turn("q", [4, 4], seconds=1.0, plain=2.0, draft_s=0.3, verify_s=0.5, pack_s=0.1, commit_s=0.06)]
    )
    found = costs(figures)
    assert found["draft_cost"] == pytest.approx(0.15 / 0.2)
    assert found["verify_cost"] == pytest.approx(0.25 / 0.2)
    assert found["other_cost"] == pytest.approx((0.5 - 0.15 - 0.25) / 0.2)
    assert figures["speedup"] == pytest.approx(5 / sum(found.values()))
    assert set(costs(cell("a", [turn("q", [])])).values()) == {None}


def test_contrasts_find_a_better_drafter_and_pair_over_seeds():
    random = np.random.default_rng(0)
    base = random.integers(0, 4, size=(40, 8))
    cells = []
    for seed in (0, 1):
        cells.append(cell("plain", [turn(str(p), row.tolist()) for p, row in enumerate(base)], seed=seed))
        cells.append(cell("better", [turn(str(p), (row + 1).tolist()) for p, row in enumerate(base)], seed=seed))
        cells.append(cell("equal", [turn(str(p), row.tolist()) for p, row in enumerate(base)], seed=seed))
    rows = contrasts(cells, resamples=500)
    tau = {(row["one"], row["other"]): row for row in rows if row["measure"] == "tau"}
    assert tau["better", "plain"]["difference"] == pytest.approx(1)
    assert [tau["better", "plain"][f"difference_{end}"] for end in ("low", "high")] == pytest.approx([1, 1])
    assert tau["better", "plain"]["verdict"] == "higher"
    assert tau["better", "plain"]["p_holm"] == pytest.approx(3 / 501)  # of three tests
    assert tau["equal", "plain"]["verdict"] == "no difference shown"
    assert tau["equal", "better"]["verdict"] == "lower"
    assert {row["tests"] for row in rows} == {3}
    by_name = {row["name"]: row for row in summary_rows(cells, resamples=200)}
    assert by_name["better"]["tau"] == pytest.approx(by_name["plain"]["tau"] + 1)
    assert by_name["better"]["seeds"] == [0, 1]
    assert by_name["better"]["answers"] == 80


def test_families_of_holm_are_one_measure_suite_and_batch():
    def pair(**place):
        return [cell(name, [turn("q", [1]), turn("r", [2])], **place) for name in "ab"]

    places = [{"tree": tree, "batch": batch} for tree in ("chain", "static") for batch in (1, 2)]
    cells = [one for place in places for one in pair(**place)] + pair(suite="sum")
    rows = contrasts(cells, resamples=100)
    assert {(row["suite"], row["batch"], row["tests"]) for row in rows} == {("qa", 1, 2), ("qa", 2, 2), ("sum", 1, 1)}


def record(parents, accepted, published, tokens):
    count = sum(accepted)
    return {
        "node_parent": parents,
        "node_accepted": accepted,
        "accepted": count,
        "published": published,
        "published_tokens": tokens,
    }


def test_misses_are_rejected_positions_whose_token_cannot_be_drafted():
    """Rows 1, 2 hang on the root, row 3 on row 1."""
    tree = [0, 0, 1]
    misses = VocabularyMisses(frozenset({7, 8}))
    misses.add(record(tree, [False, False, False], 1, [7]))  # rejected at the root, by a token outside
    misses.add(record(tree, [True, False, False], 2, [4, 5]))  # rejected below row 1, by a token inside
    misses.add(record(tree, [False, True, False], 2, [4, 8]))  # row 2 is a leaf: nothing was rejected
    misses.add(record(tree, [True, False, True], 3, [4, 5, 8]))  # down to a leaf
    misses.add(record(tree, [True, False, False], 1, [4]))  # the answer ended on a draft token
    misses.add(record([], [], 1, [8]))  # a plain round
    assert misses.to_dict() == {"reduced": True, "rejected": 2, "misses": 1, "share": 0.5}


def test_a_whole_vocabulary_misses_nothing():
    misses = VocabularyMisses(None)
    misses.add(record([0], [False], 1, [7]))
    assert misses.to_dict() == {"reduced": False, "rejected": 1, "misses": 0, "share": None}


def test_misses_of_a_reduced_vocabulary_are_counted_while_decoding(plan):
    """Half of the target's choices cannot be drafted by a vocabulary of a few tokens."""
    from eaglelab.cli.compose import compose_training
    from eaglelab.comparison import compare

    recipes = {"few": [*EAGLE3, "variant.draft_vocab_size=20"], "all": EAGLE3}
    results = compare(plan(variants=["few", "all"], recipes=recipes, budget=("steps", 1)), compose_training)
    few, whole = results["rows"]
    assert few["vocabulary_rejected"] > 0
    assert 0 < few["vocabulary_miss_share"] == few["vocabulary_misses"] / few["vocabulary_rejected"] <= 1
    assert whole["vocabulary_miss_share"] is None
    assert results["runs"][0]["draft_vocab_size"] == 20
