"""Rounds with scripted acceptance: what is accepted, that the text stays the target's, and what a round has to read."""

import json

import pytest
import torch

from eaglelab.decoding import Chain, DynamicTree, Engine, SampledTree, StaticTree
from eaglelab.evaluation import round_speed
from eaglelab.evaluation.round_speed import (
    Reading,
    check_script,
    measure_rounds,
    random_drafter,
    random_target,
    room_for,
    rounds_of,
    rounds_table,
    run_rounds,
)
from eaglelab.evaluation.scripted import ScriptedDrafter
from eaglelab.kernels.recording import Recordings
from eaglelab.target import FrozenTarget
from eaglelab.target.random_llama import LlamaShape
from tests.decoding.test_exactness import network_drafter
from tests.oracles.scripted import hf_greedy, tiny_llama
from tests.oracles.traced import traced

PROMPT = [7, 3, 5, 1]
SHAPE = LlamaShape(8, 12, num_layers=7, num_heads=2, num_kv_heads=1, vocab_size=64)
TREES = {
    "chain": Chain(4),
    "static": StaticTree(),
    "wider than deep": StaticTree([[0], [0, 0], [0, 0, 0], [1], [1, 0], [2]]),
    "dynamic": DynamicTree(width=4, depth=4, budget=12),
    "narrow": DynamicTree(width=2, depth=6, budget=7),
    "few": DynamicTree(width=3, depth=4, budget=4),
    "floor": DynamicTree(width=3, depth=4, budget=9, floor=0.2),
}


@pytest.fixture(scope="module")
def target():
    """Its next token depends on all tokens before."""
    return FrozenTarget(tiny_llama(23, layers=3))


@pytest.fixture(scope="module")
def text(target):
    return hf_greedy(target.model, PROMPT, 60)


def scripted_run(target, kind, tree, accepted, text):
    drafter = ScriptedDrafter(network_drafter(target, kind), [*PROMPT, *text], accepted)
    return run_rounds(
        Engine(target, drafter, tree), PROMPT, len(accepted), room_for(accepted, len(accepted), {"": tree})
    )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", ["feature", "fused"])
def test_what_the_script_says_is_accepted_and_the_text_is_the_librarys(kind, tree, target, text):
    accepted = [3, 0, 1, 2, 0, 0, 3]
    run = scripted_run(target, kind, TREES[tree], accepted, text)
    assert run.accepted == accepted
    assert run.published == text[1 : 1 + sum(n + 1 for n in accepted)]
    if tree == "chain":  # the first round's target rows were fed behind the prefill
        assert run.calls == {"extend": 6, "step": 3 * 7, "log_probs": 4 * 7}


def test_the_deepest_node_can_be_accepted(target, text):
    for tree, deepest in ((Chain(4), 4), (StaticTree(), 5), (TREES["narrow"], 6), (TREES["few"], 4)):
        assert scripted_run(target, "feature", tree, [deepest, 0], text).accepted == [deepest, 0]


def test_a_text_that_cannot_be_drafted_is_an_error(target, text):
    """The draft vocabulary are the even tokens."""
    places = [place for place, token in enumerate(text[1:], start=1) if token % 2]
    with pytest.raises(ValueError, match="cannot be drafted"):
        scripted_run(target, "fused, reduced vocabulary", Chain(2), [2] * len(text[: places[0] + 2]), text)


def test_a_script_is_for_one_sequence(target, text):
    drafter = ScriptedDrafter(network_drafter(target, "feature"), [*PROMPT, *text], [1])
    with pytest.raises(ValueError, match="one sequence, and 2"):
        Engine(target, drafter, Chain(2)).generate([PROMPT, PROMPT], max_new_tokens=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_counting_target_counts_and_starts_again(dtype):
    target = random_target(SHAPE, positions=96, dtype=dtype, device="cpu")
    assert target.dtype == dtype
    (result,) = Engine(target).generate([[9, 9, 50]], max_new_tokens=20)
    assert result.tokens == [*range(51, 64), *range(7)]
    with pytest.raises(ValueError, match="head of its own"):
        LlamaShape(8, 12, 1, 2, 2, 64, tied=True).build_counting(positions=64, dtype=dtype)


LAYER = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12 + 2 * 8
"""Numbers of a layer of SHAPE: q and o, k and v of one head 4 wide, MLP, two norms."""


def test_bytes_of_a_round_are_those_counted_by_hand():
    target = random_target(SHAPE, positions=96, dtype=torch.float32, device="cpu")
    verified, row = 7 * LAYER + 8 + 64 * 8, 7 * 2 * 4
    contexts, calls = [10, 12], {"extend": 1, "step": 4, "log_probs": 6}
    none = {"extend": 0, "step": 0, "log_probs": 0}
    assert Reading.of(target).per_round(contexts, none) == 4 * (verified + 11 * row)

    # EAGLE-3: q, k and v read 16 numbers, three norms; the final norm and the head; fc of three streams
    body = (16 * 8 + 2 * 16 * 4 + 8 * 8) + 3 * 8 * 12 + 3 * 8
    drafted = 5 * (body + 11 * 2 * 4) + 1 * (3 * 8 * 8) + 6 * (8 + 16 * 8)
    found = Reading.of(target, random_drafter(target, "eagle3", 16)).per_round(contexts, calls)
    assert found == 4 * (verified + 11 * row + drafted / 2)

    # EAGLE-1: fc of embedding and feature with its bias in every pass, one norm; the target's head
    body = (16 * 8 + 8) + LAYER - 8
    drafted = 5 * (body + 11 * 2 * 4) + 6 * (64 * 8)
    found = Reading.of(target, random_drafter(target, "eagle")).per_round(contexts, calls)
    assert found == 4 * (verified + 11 * row + drafted / 2)


@pytest.fixture(scope="module")
def speed():
    target = random_target(SHAPE, positions=96, dtype=torch.float32, device="cpu")
    trees = {"chain": Chain(3), "dynamic": DynamicTree(2, 3, 5)}
    drafter = random_drafter(target, "eagle3", 48)
    return measure_rounds(target, drafter, trees, [9, 0], [2, 0], rounds=3, repetitions=2, progress=False)


def test_what_is_told_is_what_was_measured(speed):
    assert speed.exact and speed.tau == pytest.approx(1 + (2 + 0 + 2) / 3)
    told = json.loads(json.dumps(speed.to_dict()))
    assert told["accepted"] == [2, 0, 2] and list(told["trees"]) == ["chain", "dynamic"]
    plain = [run.seconds for run in speed.runs["plain"]]
    for name, one in told["trees"].items():
        runs = speed.runs[name]
        assert [len(run.published) for run in runs] == [7, 7] == [len(run.published) for run in speed.runs["plain"]]
        assert one["speedup"]["values"] == pytest.approx([base / run.seconds for base, run in zip(plain, runs)])
        assert one["tokens_per_s"]["values"] == pytest.approx([7 / run.seconds for run in runs])
        seconds = one["seconds_per_round"]["median"]
        assert one["rounds_per_s"] == pytest.approx(1 / seconds)
        bytes_per_s = one["bytes_per_round"] / seconds
        assert one["share_of_roofline"] == pytest.approx(bytes_per_s / told["copy_bytes_per_s"])
        with_clocks = [run.seconds / 3 for run in speed.split[name]]
        parts = [one["seconds_of_parts"][part]["values"] for part in ("target", "drafter", "rest")]
        assert [sum(values) for values in zip(*parts)] == pytest.approx(with_clocks)
        assert min(map(min, parts)) > 0
        assert one["text_of_plain_decoding"] and one["accepted_as_scripted"]
    reading = speed.reading["plain"]  # seven rounds of one token behind a prompt of two
    assert told["plain"]["bytes_per_round"] == pytest.approx(reading.target + (2 + 8) / 2 * reading.target_row)
    table = rounds_table(speed)
    assert "2,0 tokens accepted in turn" in table and "accepted: in all runs as scripted" in table


def test_a_wrong_text_or_acceptance_is_told(speed, monkeypatch):
    monkeypatch.setattr(speed, "text", [0] * len(speed.text))
    monkeypatch.setattr(speed, "script", [2, 0, 1])
    assert not speed.exact
    table = rounds_table(speed)
    assert "text: not that of plain decoding in plain, chain, dynamic" in table
    assert "accepted: not as scripted in chain, dynamic" in table


def test_an_interrupt_leaves_whole_repetitions(monkeypatch):
    target = random_target(SHAPE, positions=96, dtype=torch.float32, device="cpu")
    calls = []

    def copy(**_):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return 1e9

    monkeypatch.setattr(round_speed, "copy_bytes", copy)
    drafter = random_drafter(target, "eagle3", 48)
    found = measure_rounds(target, drafter, {"chain": Chain(2)}, [0], [1], rounds=1, repetitions=5, progress=False)
    assert found.interrupted and {name: len(runs) for name, runs in found.runs.items()} == {"plain": 1, "chain": 1}
    assert "1 repetitions" in rounds_table(found)


@pytest.mark.parametrize(
    ("acceptance", "tree", "says"),
    [
        ([], Chain(3), "name the tokens that are accepted"),
        ([1, -1], Chain(3), "-1 is no number of tokens"),
        ([1.5], Chain(3), "1.5 is no number of tokens"),
        ([4], Chain(3), "4 tokens cannot be accepted of tree named, whose path of most likely children has 3"),
        ([2], StaticTree([[0], [1], [1, 0]]), "most likely children has 1"),
        ([5], DynamicTree(2, 6, 4), "most likely children has 4"),
        ([1], SampledTree([2, 1]), "chain, static and dynamic"),
        ([1], DynamicTree(16, 2, 4), "no wrong one would be left"),
    ],
)
def test_scripts_that_no_tree_can_follow_are_refused(acceptance, tree, says):
    with pytest.raises(ValueError, match=says):
        check_script(acceptance, {"named": tree}, 16)


def test_other_bad_input_is_refused(target):
    with pytest.raises(ValueError, match="measure at least one"):
        check_script([1], {}, 16)
    drafter = network_drafter(target, "feature")
    for numbers in ({"rounds": 0}, {"rounds": 1, "repetitions": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            measure_rounds(target, drafter, {"chain": Chain(2)}, PROMPT, [1], **numbers)
    with pytest.raises(ValueError, match="eagle proposes all"):
        random_drafter(target, "eagle", 8)
    with pytest.raises(ValueError, match="'oak' is not one of"):
        random_drafter(target, "oak")


def test_a_script_goes_on_from_its_beginning():
    assert rounds_of([3, 0, 5], 7) == [3, 0, 5, 3, 0, 5, 3]


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_recorded_rounds_follow_the_script(tree, target, text):
    """Which tokens are accepted changes from round to round, and so must come to a recording from outside."""
    accepted = [3, 0, 1, 2, 0, 0, 3]
    drafter = ScriptedDrafter(network_drafter(target, "feature"), [*PROMPT, *text], accepted)
    engine = Engine(target, drafter, TREES[tree], graphs=Recordings(traced))
    room = room_for(accepted, len(accepted), {"": TREES[tree]})
    run = run_rounds(engine, PROMPT, len(accepted), room)
    launched = scripted_run(target, "feature", TREES[tree], accepted, text)
    assert len(engine.recordings) == 2
    assert (run.accepted, run.published, run.calls) == (accepted, launched.published, launched.calls)


def test_what_one_run_recorded_serves_the_next_ones(target, text):
    """A recording is made within a round: its time is no round's. The script begins anew with every run."""
    made, accepted = [], [3, 0, 1, 2]
    drafter = ScriptedDrafter(network_drafter(target, "feature"), [*PROMPT, *text], accepted)
    recordings = Recordings(lambda function: made.append(None) or traced(function))
    engine = Engine(target, drafter, TREES["dynamic"], graphs=recordings)
    runs = [run_rounds(engine, PROMPT, 3, room_for(accepted, 3, {"": TREES["dynamic"]})) for _ in range(3)]
    assert [run.accepted for run in runs] == [accepted[:3]] * 3
    assert runs[0].calls == runs[1].calls == runs[2].calls
    assert len(made) == 2
