"""The engine against the library's greedy decoding and against a literal simulation of its rounds."""

import pytest
import torch

from eaglelab.decoding import Chain, Engine, StaticTree, make_tree
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import ScriptDrafter, drafts, full_logits, hf_greedy, simulate, tiny_llama

VOCAB = 61
TREES = {
    "chain": Chain(4),
    "static": StaticTree(),
    "custom": StaticTree([[1], [0], [1, 0], [1, 2], [1, 2, 0], [0, 0]]),
}


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB))


def prompts(count, vocab=VOCAB, seed=1):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("kind", ["perfect", "wrong", "random", "noisy"])
@pytest.mark.parametrize("tree", TREES)
def test_ids_equal_generate_and_rounds_equal_the_simulation(target, kind, tree):
    policy, predict = TREES[tree], drafts(kind, target.model, VOCAB)
    for number, prompt in enumerate(prompts(8)):
        max_new = 17 + number
        engine = Engine(target, ScriptDrafter(predict, prompt[0]), policy)
        result = engine.generate_one(prompt, max_new_tokens=max_new, stop_ids=set())
        tokens, rounds = simulate(full_logits(target.model), predict, prompt, policy.paths, max_new)
        assert result.tokens == hf_greedy(target.model, prompt, max_new) == tokens
        assert result.accepted == [r.accepted for r in rounds]
        assert [r.drafted for r in result.rounds] == [r.drafted for r in rounds]
        assert [r.published for r in result.rounds] == [len(r.published) for r in rounds]
        assert [r.verified for r in result.rounds] == [r.drafted + 1 for r in rounds]
        assert [r.round for r in result.rounds] == [*range(1, len(rounds) + 1)]
        assert result.stop_reason == "length"
        assert result.rounds[-1].stop_reason == "length"
        assert all(r.stop_reason is None for r in result.rounds[:-1])


def test_plain_decoding_goes_through_the_same_engine(target):
    for prompt in prompts(6, seed=2):
        result = Engine(target, None, make_tree("none")).generate_one(prompt, max_new_tokens=20, stop_ids=set())
        assert result.tokens == hf_greedy(target.model, prompt, 20)
        assert result.accepted == [0] * 19
        assert {r.verified for r in result.rounds} == {1}


@pytest.mark.parametrize(("tree", "depth"), [("chain", 4), ("static", 5)])
def test_a_perfect_drafter_reaches_depth_plus_one(target, tree, depth):
    """1 prefill token, then 6 whole rounds: nothing is truncated."""
    predict = drafts("perfect", target.model, VOCAB)
    for prompt in prompts(5, seed=3):
        engine = Engine(target, ScriptDrafter(predict, prompt[0]), TREES[tree])
        result = engine.generate_one(prompt, max_new_tokens=1 + 6 * (depth + 1), stop_ids=set())
        assert result.accepted == [depth] * 6
        assert [r.published for r in result.rounds] == [depth + 1] * 6


def test_a_wrong_drafter_is_never_accepted(target):
    predict = drafts("wrong", target.model, VOCAB)
    prompt = prompts(1, seed=4)[0]
    engine = Engine(target, ScriptDrafter(predict, prompt[0]), StaticTree())
    assert set(engine.generate_one(prompt, max_new_tokens=15, stop_ids=set()).accepted) == {0}


@pytest.mark.parametrize("kind", ["perfect", "noisy"])
@pytest.mark.parametrize("length", range(1, 12))
def test_max_new_tokens_is_exact_inside_a_path(target, kind, length):
    predict = drafts(kind, target.model, VOCAB)
    prompt = prompts(3, seed=5)[2]
    engine = Engine(target, ScriptDrafter(predict, prompt[0]), Chain(4))
    result = engine.generate_one(prompt, max_new_tokens=length, stop_ids=set())
    assert result.tokens == hf_greedy(target.model, prompt, length)
    assert result.stop_reason == "length"
    published = sum(r.published for r in result.rounds)
    assert published == length - 1
    for record in result.rounds:
        assert record.published - 1 <= record.accepted <= record.published


@pytest.mark.parametrize("place", range(10))
def test_nothing_after_an_end_token_is_published(target, place):
    """The end token sits at every place of an accepted path in turn, and on the frontier."""
    predict = drafts("perfect", target.model, VOCAB)
    prompt = prompts(3, seed=6)[1]
    full = hf_greedy(target.model, prompt, 24)
    eos = full[place]
    engine = Engine(target, ScriptDrafter(predict, prompt[0]), Chain(4))
    result = engine.generate_one(prompt, max_new_tokens=24, stop_ids={eos})
    assert result.tokens == hf_greedy(target.model, prompt, 24, [eos])
    assert result.tokens == full[: full.index(eos) + 1]
    assert result.stop_reason == "eos"
    _, rounds = simulate(full_logits(target.model), predict, prompt, Chain(4).paths, 24, eos=[eos])
    assert result.accepted == [r.accepted for r in rounds]


def test_the_targets_own_end_tokens_are_the_default(target):
    model = tiny_llama(VOCAB)
    prompt = prompts(1, seed=6)[0]
    eos = hf_greedy(model, prompt, 12)[9]
    model.generation_config.eos_token_id = [eos]
    frozen = FrozenTarget(model)
    result = Engine(frozen).generate_one(prompt, max_new_tokens=40)
    assert result.tokens == hf_greedy(model, prompt, 40, [eos])
    assert result.stop_reason == "eos"


def test_three_tokens_cannot_be_confused():
    """Vocabulary of 3: the same id sits in many nodes of every tree."""
    model = tiny_llama(3, seed=5)
    frozen = FrozenTarget(model)
    paths = [[a] for a in range(3)] + [[a, b] for a in range(3) for b in range(3)]
    paths += [[a, b, c] for a in range(3) for b in range(3) for c in range(2)]
    policy = StaticTree(paths)
    seen = set()
    for kind in ("noisy", "random", "wrong"):
        predict = drafts(kind, model, 3)
        for prompt in prompts(6, vocab=3, seed=7):
            drafter = ScriptDrafter(predict, prompt[0])
            result = Engine(frozen, drafter, policy).generate_one(prompt, max_new_tokens=20, stop_ids=set())
            tokens, rounds = simulate(full_logits(model), predict, prompt, paths, 20)
            assert result.tokens == tokens == hf_greedy(model, prompt, 20)
            assert result.accepted == [r.accepted for r in rounds]
            seen |= set(result.accepted)
    assert {2, 3} <= seen


def test_more_children_than_draft_tokens_is_refused():
    frozen = FrozenTarget(tiny_llama(3))
    drafter = ScriptDrafter(drafts("random", frozen.model, 3), 0)
    with pytest.raises(ValueError, match="4 children of one node.*3 tokens; use tree=chain"):
        Engine(frozen, drafter, StaticTree()).generate_one([0, 1], max_new_tokens=5)


def test_draft_vocabulary_ids_are_mapped(target):
    """The drafter ranks 20 ids, offset in the target's vocabulary."""
    target_ids = torch.arange(20) * 3 + 1
    full = full_logits(target.model)

    def predict(context):
        return full(context)[target_ids]

    hits = 0
    for prompt in prompts(6, seed=8):
        drafter = ScriptDrafter(predict, prompt[0], target_ids=target_ids)
        result = Engine(target, drafter, StaticTree()).generate_one(prompt, max_new_tokens=20, stop_ids=set())
        tokens, rounds = simulate(full, predict, prompt, StaticTree().paths, 20, target_ids=target_ids)
        assert result.tokens == tokens == hf_greedy(target.model, prompt, 20)
        assert result.accepted == [r.accepted for r in rounds]
        hits += sum(result.accepted)
    assert hits > 0


@pytest.mark.parametrize("who", ["target", "drafter"])
@pytest.mark.parametrize("tree", ["chain", "static"])
def test_drafting_stops_before_the_last_position(who, tree):
    """Beyond it tokens are decoded plainly, up to the target's last position."""
    model = tiny_llama(VOCAB, positions=48 if who == "target" else 512)
    frozen = FrozenTarget(model)
    prompt = prompts(1, seed=9)[0][:10] or [1]
    limit = 48 if who == "target" else 40
    drafter = ScriptDrafter(
        drafts("noisy", model, VOCAB),
        prompt[0],
        max_positions=10**6 if who == "target" else limit,
    )
    result = Engine(frozen, drafter, TREES[tree]).generate_one(prompt, max_new_tokens=60, stop_ids=set())
    room = min(60, frozen.max_positions - len(prompt))
    assert result.tokens == hf_greedy(model, prompt, room)
    assert result.stop_reason == ("context" if who == "target" else "length")
    assert drafter.highest_position < limit
    drafted = [record.drafted > 0 for record in result.rounds]
    plain = drafted.index(False)
    assert plain > 3
    assert not any(drafted[plain:])
    # the last drafted round could still have held its deepest node, the next one could not
    depth = TREES[tree].max_depth
    before = len(prompt) + sum(record.published for record in result.rounds[:plain])
    assert before + depth >= limit


def test_capacity_bounds_the_rows(target):
    predict = drafts("noisy", target.model, VOCAB)
    prompt = prompts(2, seed=10)[1]
    capacity = len(prompt) + 34
    engine = Engine(target, ScriptDrafter(predict, prompt[0]), StaticTree(), capacity=capacity)
    state = engine.start([prompt], max_new_tokens=100, stop_ids=set())
    records = [record for (record,) in engine.rounds(state)]
    (request,) = state.requests
    assert request.stop_reason == "context"
    assert request.new_tokens == hf_greedy(target.model, prompt, 34)
    assert records[0].drafted == 25
    assert records[-1].drafted == 0
    assert max(state.cache.lengths) <= capacity


def test_what_cannot_start_says_why(target):
    engine = Engine(target)
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate_one([], max_new_tokens=4)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        engine.generate_one([1], max_new_tokens=0)
    with pytest.raises(ValueError, match="prompt has 512 tokens.*room for 512.*shorten"):
        engine.generate_one([1] * 512, max_new_tokens=4)
    with pytest.raises(ValueError, match="drafter needs a tree"):
        Engine(target, ScriptDrafter(None, 0), None)
    with pytest.raises(ValueError, match="drafter needs a tree"):
        Engine(target, None, Chain(2))
