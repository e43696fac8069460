"""A replayed tree against a real decode with it, round by round."""

import pytest
import torch

from eaglelab.decoding import Chain, DynamicTree, Engine
from eaglelab.target import FrozenTarget
from eaglelab.tuning import Replay, record
from tests.oracles.scripted import ScriptDrafter, drafts, tiny_llama

VOCAB, DEPTH, WIDTHS, NEW = 23, 5, (1, 2, 3, 5), 18
PROMPTS = [[7, 3, 5], [9, 4], [1, 2, 3, 4, 5, 6], [11]]


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB, positions=96))


def drafter_of(target):
    return ScriptDrafter(drafts("noisy", target.model, VOCAB), [prompt[0] for prompt in PROMPTS])


def stops(target):
    """An end token that comes in the middle of some answers and in none of others."""
    (answer, *_) = Engine(target).generate(PROMPTS, max_new_tokens=NEW, stop_ids=set())
    return frozenset(answer.tokens[10:11])


def replay_of(target, *, stop_ids, batch=3, depth=DEPTH, widths=WIDTHS):
    recordings = record(
        target,
        drafter_of(target),
        PROMPTS,
        widths=widths,
        depth=depth,
        max_new_tokens=NEW,
        batch=batch,
        stop_ids=stop_ids,
    )
    return Replay(recordings)


@pytest.fixture(scope="module", params=["length", "end token"])
def case(request, target):
    stop_ids = frozenset() if request.param == "length" else stops(target)
    return replay_of(target, stop_ids=stop_ids), stop_ids


def check(replay, target, stop_ids, tree, width, depth, budget, floor=0.0):
    results = []
    for prompt in PROMPTS:  # one by one: at batch 1 a floor is each sequence's own
        drafter = ScriptDrafter(drafts("noisy", target.model, VOCAB), prompt[0])
        engine = Engine(target, drafter, tree)
        results += engine.generate([prompt], max_new_tokens=NEW, stop_ids=stop_ids)
    replayed = replay.rounds(width, depth, budget, floor)
    for result, rounds, recording in zip(results, replayed, replay.recordings, strict=True):
        assert result.tokens == recording.tokens
        assert [one.accepted for one in rounds] == result.accepted
        assert [one.published for one in rounds] == [record.published for record in result.rounds]
        assert [one.rows for one in rounds] == [record.verified for record in result.rounds]
        assert [one.drafts for one in rounds] == [record.expanded > 0 for record in result.rounds]
        if not isinstance(tree, Chain):
            drafted = [width + width * sum(one.forwarded) if one.drafts else 0 for one in rounds]
            assert drafted == [record.expanded for record in result.rounds]
    return [count for result in results for count in result.accepted]


@pytest.mark.parametrize(
    ("width", "depth", "budget"),
    [(5, 5, 40), (5, 3, 7), (3, 5, 12), (2, 5, 6), (2, 1, 2), (3, 5, 3), (5, 4, 1)],
)
def test_a_smaller_tree_accepts_what_a_real_decode_accepts(case, target, width, depth, budget):
    replay, stop_ids = case
    accepted = check(replay, target, stop_ids, DynamicTree(width, depth, budget), width, depth, budget)
    assert len(set(accepted)) > 1, "the case decides nothing"


@pytest.mark.parametrize("floor", [0.02, 0.1, 0.5])
@pytest.mark.parametrize(("width", "depth", "budget"), [(5, 5, 20), (1, 5, 5)])
def test_so_does_one_with_a_floor(case, target, width, depth, budget, floor):
    replay, stop_ids = case
    check(replay, target, stop_ids, DynamicTree(width, depth, budget, floor), width, depth, budget, floor)


def test_a_chain_is_a_tree_of_width_1(case, target):
    replay, stop_ids = case
    check(replay, target, stop_ids, Chain(4), 1, 4, 4)


def test_a_narrow_frontier_is_not_always_part_of_a_wide_one(case):
    """Why each width is recorded for itself."""
    replay, _ = case
    lost = 0
    for one in replay.recordings:
        for growth in filter(None, one.growths):
            paths = {width: set(_paths(growth[width])) for width in (2, 5)}
            lost += not paths[2] <= paths[5]
    assert lost > 0


def _paths(growth):
    paths = [()]
    for parent, token in zip(growth.parent_M.tolist(), growth.tokens_M.tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_recording_does_not_depend_on_the_batch(target):
    one, many = (replay_of(target, stop_ids=frozenset(), batch=batch, depth=3, widths=(1, 3)) for batch in (1, 4))
    for alone, together in zip(one.recordings, many.recordings, strict=True):
        assert alone.tokens == together.tokens
        for left, right in zip(alone.growths, together.growths, strict=True):
            assert (left is None) == (right is None)
            if left is not None:
                for width in (1, 3):
                    assert left[width].tokens_M.tolist() == right[width].tokens_M.tolist()
                    torch.testing.assert_close(left[width].value_M, right[width].value_M)


def test_what_was_not_recorded_cannot_be_replayed(target):
    replay = replay_of(target, stop_ids=frozenset(), depth=2, widths=(1, 2))
    for wrong in ((3, 2, 4), (2, 3, 4), (2, 0, 4)):
        with pytest.raises(ValueError, match=r"recorded are widths \[1, 2\] down to depth 2"):
            replay.rounds(*wrong)
    with pytest.raises(ValueError, match="widths="):
        record(target, drafter_of(target), PROMPTS, widths=(), depth=2, max_new_tokens=4)
