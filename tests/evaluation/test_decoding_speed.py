"""Ratios of alternating runs, and clocks that add up."""

import time

import pytest
import torch

from eaglelab.decoding import DynamicTree, Engine
from eaglelab.evaluation.alternation import Spread, alternate, ratio
from eaglelab.evaluation.decoding_speed import Clock, decode_run, measure_decoding, networks_timed
from eaglelab.target import FrozenTarget
from tests.decoding.test_exactness import network_drafter
from tests.oracles.scripted import tiny_llama

PROMPTS = [[7, 3, 5], [9, 4], [1, 2, 3, 4]]


def test_contestants_alternate_and_the_first_round_is_left_out():
    order = []

    def contestant(name):
        return lambda: order.append(name) or len(order)

    results, interrupted = alternate({name: contestant(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabccba"
    assert results == {"a": [6, 7, 12], "b": [5, 8, 11], "c": [4, 9, 10]} and not interrupted


def test_an_interrupt_leaves_whole_repetitions():
    calls = []

    def fail_later():
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return len(calls)

    results, interrupted = alternate({"a": lambda: 0, "b": fail_later}, 5)
    assert interrupted and results == {"a": [0], "b": [2]}


def test_spreads_are_of_ratios_within_a_repetition():
    spread = ratio([2, 30, 4, 5, 60], [1, 10, 1, 1, 10])
    assert spread.values == (2, 3, 4, 5, 6)
    assert (spread.low, spread.median, spread.high) == (3, 4, 5)
    assert Spread.of([7.0]).low == Spread.of([7.0]).high == 7
    with pytest.raises(ValueError, match="no repetition"):
        Spread.of([])


class Owner:
    def outer(self):
        self.inner()
        self.inner()

    def inner(self):
        time.sleep(0.01)


def test_a_clock_counts_the_outermost_call_once_and_lets_go():
    owner, clock = Owner(), Clock(torch.device("cpu"))
    with clock.on(owner, "outer"), clock.on(owner, "inner"):
        began = time.perf_counter()
        owner.outer()
        passed = time.perf_counter() - began
    assert 0.02 <= clock.seconds <= passed
    before = clock.seconds
    owner.outer()
    assert clock.seconds == before and vars(owner) == {}


@pytest.fixture(scope="module")
def engine():
    target = FrozenTarget(tiny_llama(23, layers=3))
    return Engine(target, network_drafter(target, "feature"), DynamicTree(2, 3, 5))


def test_answers_of_one_token_have_no_round_to_measure(engine):
    with pytest.raises(ValueError, match="raise max_new_tokens"):
        decode_run(engine, PROMPTS, 1)


def test_a_run_counts_what_the_engine_publishes(engine):
    results = engine.generate(PROMPTS, max_new_tokens=9)
    for batch in (1, 2):
        run = decode_run(engine, PROMPTS, 9, batch)
        assert run.all_tokens == sum(len(result.tokens) for result in results)
        assert run.tokens == run.all_tokens - len(PROMPTS)
        assert run.rounds == sum(len(result.rounds) for result in results)
        assert run.accepted == sum(sum(result.accepted) for result in results)
        assert 0 < run.target < run.decode < run.whole and 0 < run.drafter < run.decode
        assert run.target + run.drafter < run.decode


def test_the_head_is_the_drafters_where_the_drafter_calls_it(engine):
    target, drafter = engine.target, engine.drafter
    hidden = torch.zeros(1, target.hidden_size)
    with networks_timed(target, drafter) as (in_target, in_drafter):
        drafter.log_probs(hidden)
        assert in_target.seconds == 0 and in_drafter.seconds > 0
        before = in_drafter.seconds
        target.lm_head(hidden)
        assert in_target.seconds > 0 and in_drafter.seconds == before
    assert "lm_head" not in vars(target) and "forward" not in vars(target.decoder)


def test_nothing_to_measure_is_an_error(engine):
    for trees, prompts, repetitions in (
        ({}, PROMPTS, 1),
        ({"a": engine.tree}, [], 1),
        ({"a": engine.tree}, PROMPTS, 0),
    ):
        with pytest.raises(ValueError, match="at least one tree"):
            measure_decoding(
                engine.target, engine.drafter, trees, prompts, max_new_tokens=4, repetitions=repetitions, progress=False
            )
