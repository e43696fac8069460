"""`compile=True` changes how rounds run, not what they decide: ids, acceptance and state are those of eager rounds."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from eaglelab.decoding import Chain, DynamicTree, Engine, Sampling
from eaglelab.target import FrozenTarget
from tests.decoding.test_exactness import network_drafter
from tests.decoding.test_transaction import TAPS, assert_is_fresh_prefill
from tests.oracles.scripted import ScriptDrafter, drafts, tiny_llama

PROMPTS = [[7, 3, 5], [9, 4], [1, 2, 3, 4, 5, 6]]
TREES = {"none": None, "chain": Chain(3), "dynamic": DynamicTree(3, 3, 7)}


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(23, layers=3))


@pytest.fixture
def captured(monkeypatch, target):
    """Graphs are captured as ever and run without generated code, which would take minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    yield counters
    target.__dict__.pop("_compiled_rows", None)
    torch._dynamo.reset()


def engines(target, tree, kind):
    for compile in (False, True):
        drafter = None if TREES[tree] is None else network_drafter(target, kind)
        yield Engine(target, drafter, TREES[tree], compile=compile)


def check(eager, compiled, batch, sampling=None):
    settings = {"max_new_tokens": 14, "stop_ids": set(), "batch": batch, "sampling": sampling}
    expected, found = (engine.generate(PROMPTS, **settings) for engine in (eager, compiled))
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.accepted for one in found] == [one.accepted for one in expected]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("tree", "kind"), [("none", "feature"), ("chain", "feature"), ("dynamic", "feature"), ("dynamic", "fused")]
)
def test_compiled_rounds_decide_the_same(target, tree, kind, batch, captured):
    eager, compiled = engines(target, tree, kind)
    check(eager, compiled, batch)
    assert 1 <= captured["stats"]["unique_graphs"] <= 3, "verification, and a draft step; lengths must not matter"


def test_so_do_sampled_ones(target, captured):
    eager, compiled = engines(target, "dynamic", "feature")
    check(eager, compiled, 3, Sampling(temperature=0.8, seed=4))


def test_the_state_is_that_of_a_fresh_prefill(target, captured):
    drafter = ScriptDrafter(drafts("noisy", target.model, 23), PROMPTS[0][0], taps=TAPS)
    compiled = Engine(target, drafter, TREES["dynamic"], compile=True)
    state = compiled.start([PROMPTS[0]], max_new_tokens=14, stop_ids=set())
    for _ in compiled.rounds(state):
        assert_is_fresh_prefill(state, target.model)
    assert captured["stats"]["unique_graphs"] >= 1


@pytest.mark.slow
def test_generated_code_decides_the_same(target):
    torch._dynamo.reset()
    try:
        for tree in ("chain", "dynamic"):
            eager, compiled = engines(target, tree, "fused")
            check(eager, compiled, 1)
    finally:
        target.__dict__.pop("_compiled_rows", None)
        torch._dynamo.reset()


@pytest.mark.parametrize("batch", [1, 3])
def test_nothing_is_compiled_unasked(target, batch, monkeypatch):
    def refuse(*arguments, **settings):
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    eager, asked = engines(target, "dynamic", "feature")
    settings = {"max_new_tokens": 6, "stop_ids": set(), "batch": batch}
    assert [len(one.tokens) for one in eager.generate(PROMPTS, **settings)] == [6, 6, 6]
    with pytest.raises(AssertionError, match="compiled"):
        asked.generate(PROMPTS, **settings)
