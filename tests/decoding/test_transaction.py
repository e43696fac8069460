"""Committed state: what it is after any round, and that a failing round leaves it alone."""

import sys

import pytest
import torch

from eaglelab.decoding import Chain, Engine, StaticTree
from eaglelab.decoding.transaction import Transaction
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import ScriptDrafter, drafts, hf_greedy, tiny_llama

VOCAB = 61
PROMPT = [5, 9, 44, 2, 17, 30, 8]
TAPS = (1, "final")


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB))


def new_engine(target, tree, kind="noisy", taps=TAPS):
    return Engine(target, ScriptDrafter(drafts(kind, target.model, VOCAB), PROMPT[0], taps=taps), tree)


def assert_is_fresh_prefill(state, model):
    """K/V and features of the committed prefix against one forward of the library's model."""
    (request,) = state.requests
    n = len(request.tokens) - 1
    assert state.cache.lengths == [n]
    assert state.length_B1.tolist() == [[n]]
    assert state.frontier_B1.tolist() == [request.tokens[-1:]]
    with torch.no_grad():
        fresh = model(torch.tensor([request.tokens[:n]]), use_cache=True, output_hidden_states=True)
    for layer in range(model.config.num_hidden_layers):
        expected = fresh.past_key_values.layers[layer]
        keys, values = state.cache._keys[layer][:, :, :n], state.cache._values[layer][:, :, :n]
        torch.testing.assert_close(keys, expected.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, expected.values, atol=1e-5, rtol=1e-5)
    # hidden_states[1] enters layer 1; the last one is after the final norm
    expected = torch.cat([fresh.hidden_states[1][0], fresh.hidden_states[-1][0]], dim=-1)
    kept = list(state.draft[0].features)
    tokens = list(state.draft[0].tokens)
    if state.pending is not None:
        count, start = state.pending.counts[0], state.pending.starts[0]
        assert len(kept) in (start, n), "an interrupt may strike between extending and clearing"
        kept, tokens = kept[:start], tokens[: start + 1]
        assert state.pending.position_BN[0, :count].tolist() == list(range(start, n))
        kept += list(state.pending.features_BNF[0, :count])
        tokens += state.pending.tokens_BN[0, :count].tolist()
    torch.testing.assert_close(torch.stack(kept), expected, atol=1e-5, rtol=1e-5)
    assert tokens == request.tokens
    assert state.draft[0].nodes == []


@pytest.mark.parametrize("tree", [Chain(4), StaticTree()], ids=["chain", "static"])
@pytest.mark.parametrize("kind", ["perfect", "noisy", "wrong"])
def test_state_after_every_round_equals_a_fresh_prefill(target, tree, kind):
    engine = new_engine(target, tree, kind)
    state = engine.start([PROMPT], max_new_tokens=30, stop_ids=set())
    assert_is_fresh_prefill(state, target.model)
    for _ in engine.rounds(state):
        assert_is_fresh_prefill(state, target.model)


@pytest.mark.parametrize("stop", [3, 4, 5, 6, 7])
def test_a_stopped_generation_can_go_on(target, stop):
    """After a length limit or end token inside a path the state is an ordinary committed one."""
    engine = new_engine(target, Chain(4), "perfect")
    engine.capacity = 64
    full = hf_greedy(target.model, PROMPT, 25)
    for limits in ({"max_new_tokens": stop}, {"max_new_tokens": 25, "stop_ids": {full[stop]}}):
        state = engine.start([PROMPT], **({"stop_ids": set()} | limits))
        list(engine.rounds(state))
        (request,) = state.requests
        assert request.new_tokens == full[: len(request.new_tokens)]
        assert len(request.new_tokens) < 25
        assert_is_fresh_prefill(state, target.model)
        request.max_tokens, request.stop_ids = len(PROMPT) + 25, frozenset()
        request.stop_reason = None
        list(engine.rounds(state))
        assert request.new_tokens == full
        assert_is_fresh_prefill(state, target.model)


@pytest.mark.parametrize("tree", [Chain(4), StaticTree()], ids=["chain", "static"])
@pytest.mark.parametrize("where", ["extend", "step", "log_probs", "before", "after", "commit"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_exception_leaves_the_committed_state_usable(target, monkeypatch, tree, where, nth):
    engine = new_engine(target, tree)
    state = engine.start([PROMPT], max_new_tokens=30, stop_ids=set())
    failures = []
    if where in engine.drafter.calls:
        engine.drafter.fail = {where: engine.drafter.calls[where] + nth}
    elif where == "commit":
        break_call(monkeypatch, state.cache, "commit", nth, after=False)
    else:
        break_call(monkeypatch, target, "forward_rows", nth, after=where == "after")
    while state.requests[0].stop_reason is None:
        before = list(state.requests[0].tokens)
        try:
            engine.round(state)
        except RuntimeError as error:
            failures.append(error)
            assert state.requests[0].tokens == before
            assert_is_fresh_prefill(state, target.model)
    assert len(failures) == 1
    assert "scripted failure" in str(failures[0])
    assert state.requests[0].new_tokens == hf_greedy(target.model, PROMPT, 30)


def test_an_interrupt_on_any_line_leaves_the_committed_state_usable(target):
    """Ctrl-C strikes between two statements: on every line of a round in turn, commit included."""
    expected = hf_greedy(target.model, PROMPT, 8)
    outcomes = set()
    for line in range(10_000):
        engine = new_engine(target, StaticTree([[0], [1], [1, 0]]))
        state = engine.start([PROMPT], max_new_tokens=8, stop_ids=set())
        engine.round(state)
        before = list(state.requests[0].tokens)
        if not interrupted_on_line(line, lambda: engine.round(state)):  # noqa: B023
            break
        outcomes.add(state.requests[0].tokens == before)
        with Transaction(state, engine.drafter):
            pass  # what the next round does first
        assert_is_fresh_prefill(state, target.model)
        list(engine.rounds(state))
        assert state.requests[0].new_tokens == expected
    assert line > 100
    assert outcomes == {True, False}, "some interrupts leave the old state, later ones the new one"


STATEFUL = ("decoding/engine.py", "decoding/state.py", "decoding/transaction.py", "target/kv.py")


def interrupted_on_line(number, work):
    """Run `work` with a KeyboardInterrupt on its number-th line in the package; False if it ended before."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(STATEFUL):
            return None
        if event == "line":
            seen += 1
            if seen == number + 1:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def break_call(monkeypatch, holder, name, nth, *, after):
    """Make the nth call of a method fail, with its work done or not."""
    real, calls = getattr(holder, name), []

    def broken(*args, **kwargs):
        calls.append(None)
        if len(calls) == nth and not after:
            raise RuntimeError("scripted failure")
        result = real(*args, **kwargs)
        if len(calls) == nth:
            raise RuntimeError("scripted failure")
        return result

    monkeypatch.setattr(holder, name, broken)


def test_results_do_not_depend_on_earlier_generations(target):
    """One engine, one policy object: a second prompt starts clean."""
    engine = new_engine(target, StaticTree())
    first = engine.generate_one(PROMPT, max_new_tokens=20, stop_ids=set())
    engine.generate_one(PROMPT[:3], max_new_tokens=9, stop_ids=set())
    again = engine.generate_one(PROMPT, max_new_tokens=20, stop_ids=set())
    assert (again.tokens, again.accepted) == (first.tokens, first.accepted)
