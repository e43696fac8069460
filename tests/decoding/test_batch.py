"""Batches: each sequence decodes as if it were alone, whoever sits beside it, joins or leaves."""

from types import SimpleNamespace

import pytest
import torch

from eaglelab.decoding import Chain, DynamicTree, Engine, SampledTree, Sampling, StaticTree
from eaglelab.decoding.admission import check_memory, similar
from eaglelab.decoding.state import Request
from eaglelab.drafters import DrafterConfig, FeatureDrafter, SlotDrafter
from eaglelab.target import FrozenTarget, closing_order
from eaglelab.target.kv import moves
from tests.oracles.scripted import ScriptDrafter, drafts, hf_greedy, tiny_llama

VOCAB = 61
TREES = {
    "chain": Chain(4),
    "static": StaticTree(),
    "dynamic": DynamicTree(width=4, depth=4, budget=12),
    "sampled": SampledTree(widths=[3, 2, 1]),
}
PROMPTS = [
    torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 1, 19, 4, 12, 7, 2)
]


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB))


@pytest.fixture(scope="module")
def drafter(target):
    torch.manual_seed(2)
    network = FeatureDrafter(DrafterConfig.from_target(target.text_config))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return SlotDrafter(network, target, ("final",))


def settings(kind):
    """One sampling per prompt."""
    if kind == "greedy":
        return [Sampling()] * len(PROMPTS)
    if kind == "sampled":
        return [Sampling(temperature=0.8, top_p=0.9, seed=n) for n in range(len(PROMPTS))]
    return [Sampling(temperature=0.5 * (n % 3), top_k=[None, 5][n % 2], seed=n) for n in range(len(PROMPTS))]


@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("tree", TREES)
def test_a_batch_gives_the_results_of_single_runs(target, drafter, tree, kind):
    """Seven prompts, three at a time: lengths differ, requests join and leave in the middle."""
    engine = Engine(target, drafter, TREES[tree])
    samplings = settings(kind)
    limits = {"max_new_tokens": 18, "stop_ids": set(range(0, VOCAB, 7))}
    alone = [
        engine.generate_one(prompt, sampling=one, **limits) for prompt, one in zip(PROMPTS, samplings, strict=True)
    ]
    sizes = set()
    together = engine.generate(
        PROMPTS, sampling=samplings, batch=3, on_round=lambda records: sizes.add(len(records)), **limits
    )
    for one, other in zip(alone, together, strict=True):
        assert other.tokens == one.tokens
        assert other.accepted == one.accepted
        assert [r.drafted for r in other.rounds] == [r.drafted for r in one.rounds]
        assert other.stop_reason == one.stop_reason
    assert 3 in sizes
    assert len({len(result.tokens) for result in together}) > 1, "the requests must not all stop together"


@pytest.mark.parametrize("tree", ["chain", "static"])
def test_every_argument_of_the_drafter_is_right_in_a_ragged_batch(target, tree):
    """The scripted drafter checks tokens, positions, ancestors and hidden states of every sequence."""
    predict = drafts("noisy", target.model, VOCAB)
    engine = Engine(target, ScriptDrafter(predict, [prompt[0] for prompt in PROMPTS]), TREES[tree])
    for prompt, result in zip(
        PROMPTS, engine.generate(PROMPTS, max_new_tokens=16, stop_ids=set(), batch=4), strict=True
    ):
        assert result.tokens == hf_greedy(target.model, prompt, 16)
        assert sum(result.accepted) > 0


def test_one_at_its_last_position_does_not_disturb_the_others(drafter):
    """A sequence that may no longer draft is decoded plainly beside those that still do."""
    frozen = FrozenTarget(tiny_llama(VOCAB, positions=40))
    close = SlotDrafter(drafter.network, frozen, ("final",))
    prompts = [PROMPTS[2] + PROMPTS[4], PROMPTS[3], PROMPTS[0]]
    engine = Engine(frozen, close, TREES["dynamic"])
    alone = [engine.generate_one(prompt, max_new_tokens=30, stop_ids=set()) for prompt in prompts]
    together = engine.generate(prompts, max_new_tokens=30, stop_ids=set())
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.accepted for r in together] == [r.accepted for r in alone]
    assert [r.stop_reason for r in together] == ["context", "length", "length"]
    plain = [record.drafted == 0 for record in together[0].rounds]
    assert any(plain)
    beside = {record.round for record in together[0].rounds if record.drafted == 0}
    assert any(r.drafted for result in together[1:] for r in result.rounds if r.round in beside)


@pytest.mark.parametrize("tree", ["static", "dynamic"])
def test_committed_state_of_every_sequence_equals_a_fresh_prefill(target, drafter, tree):
    engine = Engine(target, drafter, TREES[tree])
    state = engine.start(PROMPTS[:3], max_new_tokens=20, stop_ids=set(), room=5)
    for number in range(5):
        engine.round(state)
        if number == 1:
            state.join(engine.start(PROMPTS[3:5], max_new_tokens=9, stop_ids=set()), drafter)
        if number == 3:
            state.select([4, 1, 2], drafter)
        for b, request in enumerate(state.requests):
            n = len(request.tokens) - 1
            with torch.no_grad():
                fresh = target.model(torch.tensor([request.tokens[:n]]), use_cache=True, output_hidden_states=True)
            assert state.cache.lengths[b] == n == int(state.length_B1[b])
            assert int(state.frontier_B1[b]) == request.tokens[-1]
            for layer, expected in enumerate(fresh.past_key_values.layers):
                keys, values = state.cache.slots(layer)
                torch.testing.assert_close(keys[b, :, :n], expected.keys[0], atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(values[b, :, :n], expected.values[0], atol=1e-5, rtol=1e-5)
            final_nd = fresh.hidden_states[-1][0]
            if state.pending is not None and (count := state.pending.counts[b]):
                features = state.pending.features_BNF[b, :count]
                torch.testing.assert_close(features, final_nd[n - count :], atol=1e-5, rtol=1e-5)
            alone = drafter.new_state(1, 64)
            drafter.extend(alone, final_nd[None], torch.tensor([request.tokens[1:]]), torch.arange(n)[None])
            kept = state.draft.lengths[b]
            assert kept == n - (state.pending.counts[b] if state.pending else 0)
            for mine, theirs in (
                (state.draft._keys_BGCD, alone._keys_BGCD),
                (state.draft._values_BGCD, alone._values_BGCD),
            ):
                torch.testing.assert_close(mine[b, :, :kept], theirs[0, :, :kept], atol=1e-5, rtol=1e-5)


def test_closing_order_moves_as_few_as_it_must():
    assert closing_order([True, True]) == [0, 1]
    assert closing_order([False, True, True, False, True]) == [4, 1, 2]
    assert closing_order([False, False]) == []
    for size in range(1, 6):
        for bits in range(2**size):
            alive = [bool(bits >> b & 1) for b in range(size)]
            order = closing_order(alive)
            assert sorted(order) == [b for b in range(size) if alive[b]]
            assert len(moves(order)) == sum(b >= len(order) for b in range(size) if alive[b])


def test_memory_is_bounded_and_said_before_it_is_taken(target, drafter):
    engine = Engine(target, drafter, Chain(3), max_kv_bytes=100 * target.kv_row_bytes)
    with pytest.raises(ValueError, match=r"4 sequences of 30 rows need .* allowed: use a batch of at most 3"):
        engine.generate(PROMPTS[:4], max_new_tokens=8, batch=4)
    with pytest.raises(ValueError, match="use fewer new tokens or shorter prompts"):
        engine.generate(PROMPTS[:1], max_new_tokens=200)
    results = engine.generate(PROMPTS[:4], max_new_tokens=8, batch=3, stop_ids=set())
    assert [len(result.tokens) for result in results] == [8] * 4


def test_what_cannot_start_in_a_batch_says_which(target):
    engine = Engine(target)
    with pytest.raises(ValueError, match="prompt 1: empty prompt"):
        engine.generate([[1], []], max_new_tokens=4)
    with pytest.raises(ValueError, match="prompt 2: the prompt has 600 tokens"):
        engine.generate([[1], [2], [3] * 600], max_new_tokens=4)
    with pytest.raises(ValueError, match="2 samplings for 1 prompts"):
        engine.generate([[1]], max_new_tokens=4, sampling=[Sampling(), Sampling()])
    with pytest.raises(ValueError, match="list of prompts.*generate_one"):
        engine.generate([1, 2], max_new_tokens=4)
    with pytest.raises(ValueError, match="batch=0"):
        engine.generate([[1]], max_new_tokens=4, batch=0)
    with pytest.raises(ValueError, match="no prompts"):
        engine.generate([], max_new_tokens=4)


def test_prompts_are_prefilled_with_those_of_similar_length():
    def groups(*lengths, device="cpu"):
        requests = [Request([1] * n, n, n + 1, "length", frozenset()) for n in lengths]
        found = similar(requests, torch.device(device))
        assert [one for group in found for one in group] == requests
        return [[request.prompt_length for request in group] for group in found]

    assert groups(5) == [[5]]
    assert groups(30, 30, 14, 31) == [[30, 30, 14, 31]]
    assert groups(30, 30, 30, 36) == [[30, 30, 30], [36]]  # three rows longer by six
    assert groups(10, 26, 9, 100, 84) == [[10, 26], [9], [100, 84]]
    assert groups(10, 27) == [[10], [27]]
    assert groups(10, 300, 200, 90, device="cuda") == [[10, 300, 200, 90]]
    assert groups(10, 600, device="cuda") == [[10], [600]]


def test_memory_that_torch_holds_for_nobody_is_free(monkeypatch):
    """The slots of a generation before are given back to torch, which does not give them back to the device."""
    for name, value in {"mem_get_info": (10, 100), "memory_reserved": 60, "memory_allocated": 20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    target = SimpleNamespace(kv_row_bytes=1, device=torch.device("cuda"))
    check_memory(target, 1, 49, None)
    with pytest.raises(ValueError, match="key/value slots"):
        check_memory(target, 1, 50, None)
