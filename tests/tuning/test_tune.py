"""The whole of tuning on a tiny target: what is timed leaves no trace, and what is named was the fastest predicted."""

import pytest

from eaglelab.decoding import Chain, DynamicTree, Engine, StaticTree
from eaglelab.target import FrozenTarget
from eaglelab.tuning import Grid, measure_costs, tune, tuning_table
from eaglelab.tuning import tune as tuning_verb
from eaglelab.tuning.costs import _Bench
from tests.decoding.test_exactness import network_drafter
from tests.oracles.scripted import tiny_llama

PROMPTS = [[7, 3, 5], [9, 4], [1, 2, 3, 4]]
GRID = Grid((1, 2, 3), 3, (2, 5, 12), (0.0, 0.1))


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(23, layers=3))


@pytest.fixture(scope="module")
def drafter(target):
    return network_drafter(target, "feature")


def run(target, drafter, default, **settings):
    settings = {"max_new_tokens": 12, "repetitions": 2, "progress": False} | settings
    return tune(target, drafter, default, PROMPTS, PROMPTS[:2], GRID, **settings)


@pytest.mark.parametrize("batch", [1, 2])
def test_tuning_predicts_measures_and_tells(target, drafter, batch):
    found = run(target, drafter, DynamicTree(3, 3, 8), batch=batch)
    figures, table = found.to_dict(), tuning_table(found)
    assert found.best.tokens_per_s == max(one.tokens_per_s for one in found.predictions)
    assert {one.shape.floor for one in found.predictions} == ({0.0, 0.1} if batch == 1 else {0.0})
    assert figures["overrides"] == found.best.shape.overrides and found.best.shape.overrides in table
    for name in ("plain", "default", "best"):
        assert len(found.measured[name]) == 2
        assert figures["measured"][name]["tau"] >= 1
    assert figures["measured"]["plain"]["speedup"]["values"] == [1, 1]
    assert found.default.shape.budget == 8
    assert str(found.best.shape) in table


def test_the_measured_tau_of_recorded_prompts_is_the_predicted_one(target, drafter):
    found = tune(target, drafter, Chain(2), PROMPTS, PROMPTS, GRID, max_new_tokens=12, repetitions=1, progress=False)
    assert found.measured["default"][0].tau == pytest.approx(found.default.tau)
    assert found.measured["best"][0].tau == pytest.approx(found.best.tau)


def test_a_fixed_default_is_measured_without_a_prediction(target, drafter):
    found = run(target, drafter, StaticTree([(0,), (1,)]), repetitions=1)
    assert found.default is None and found.to_dict()["default"]["predicted"] is None
    assert found.measured["default"] and "default: static" in tuning_table(found)


def test_timed_parts_leave_the_state_as_it_was(target, drafter):
    bench = _Bench(target, drafter, DynamicTree(3, 2, 24), PROMPTS, 12)
    state, engine = bench.state, bench.engine
    for job in (bench.verify(1), bench.verify(6), bench.grow(1, 1), bench.grow(3, 2)):
        assert bench.time(job) > 0
    assert [request.tokens for request in state.requests] == [
        prompt + Engine(target).generate([prompt], max_new_tokens=1)[0].tokens for prompt in PROMPTS
    ]
    requests = list(state.requests)
    for _ in engine.rounds(state):
        pass
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.stop_reason == "length"
        (plain,) = Engine(target).generate([prompt], max_new_tokens=len(request.new_tokens), stop_ids=set())
        assert request.new_tokens == plain.tokens


def test_every_size_is_timed(target, drafter):
    costs = measure_costs(target, drafter, PROMPTS[:1], widths=[1, 3], rows=[1, 2, 9], repetitions=2)
    assert set(costs.verify) == {1, 2, 9} and set(costs.level) == {1, 3}
    assert min(costs.verify.values()) > 0 and min(costs.level.values()) >= 0 and costs.root > 0


def test_an_interrupt_while_measuring_keeps_what_is_known(target, drafter, monkeypatch):
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 8:  # three to warm up, three that count, then in the middle
            raise KeyboardInterrupt
        return original(*args)

    original = tuning_verb.__globals__["decode_run"]
    monkeypatch.setitem(tuning_verb.__globals__, "decode_run", interrupted)
    found = run(target, drafter, DynamicTree(3, 3, 8), repetitions=5)
    assert found.interrupted and {name: len(runs) for name, runs in found.measured.items()} == {
        "plain": 1, "default": 1, "best": 1,
    }  # fmt: skip
    assert found.to_dict()["interrupted"] and "1 repetitions" in tuning_table(found)
    calls[:] = [()] * 7
    found = run(target, drafter, DynamicTree(3, 3, 8), repetitions=5)
    assert found.interrupted and "nothing was measured" in tuning_table(found)


def test_settings_out_of_range(target, drafter):
    for settings, message in (
        ({"repetitions": 0}, "repetitions=0"),
        ({"batch": 0}, "batch=0"),
        ({"batch": 3}, "2 prompts to measure on, and batch=3"),
    ):
        with pytest.raises(ValueError, match=message):
            run(target, drafter, DynamicTree(3, 3, 8), **settings)
    with pytest.raises(ValueError, match="draft vocabulary has 23 tokens"):
        tune(target, drafter, Chain(2), PROMPTS, PROMPTS, Grid((40,), 2, (4,)), max_new_tokens=8, progress=False)
