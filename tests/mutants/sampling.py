"""Which distribution a token is drawn from, and with which numbers."""

from __future__ import annotations

import dataclasses
import types

from tests.mutants.registry import mutant

SAME_TEXT = "tests/decoding/test_sampling.py::test_sampled_text_is_that_of_plain_sampling"
SCORES = "tests/decoding/test_sampling.py::test_processed_scores_are_the_librarys"
LAW = "tests/decoding/test_statistics.py::test_sampled_text_has_the_law_of_the_target"


@mutant("one stream of numbers for all requests", "tests/decoding/test_sampling.py::test_one_seed_one_text")
def stream_shared() -> None:
    from eaglelab.decoding import state

    stream = state.Stream
    state.Stream = lambda seed: stream(0)


@mutant("numbers used up by rejected rows", SAME_TEXT + "[plain-chain-noisy]")
def numbers_used_up() -> None:
    from eaglelab.decoding.sampling import Stream

    at = Stream.at

    def next_ones(self, first, count):
        begin = getattr(self, "used", 0)
        self.used = begin + count
        return at(self, begin, count)

    Stream.at = next_ones


@mutant("repetition penalty without the root token", SCORES + "[greedy_penalty]")
def penalty_without_root() -> None:
    from eaglelab.decoding import sampling

    look_back = sampling._look_back

    def shorter(scores_RV, flat, b, prefix, processors):
        return look_back(
            scores_RV, dataclasses.replace(flat, tokens_BR=flat.tokens_BR.roll(1, 1)), b, prefix, processors
        )

    sampling._look_back = shorter


def break_rule(name: str) -> None:
    from tests.decoding.wrong_rules import WRONG

    WRONG[name].apply(types.SimpleNamespace(setattr=setattr))


@mutant("temperature skipped on the bonus token of a static tree", LAW + "[static]")
def bonus_unprocessed() -> None:
    break_rule("bonus token from the unprocessed distribution")


@mutant("temperature skipped on the bonus token of a sampled tree", LAW + "[sampled]")
def bonus_at_temperature_1() -> None:
    break_rule("temperature skipped after an accepted path")


@mutant("top-p before the temperature", SCORES + "[top_p]")
def top_p_first() -> None:
    break_rule("top-p before the temperature")


@mutant("q keeps the rejected child", LAW + "[sampled]")
def q_keeps_the_rejected() -> None:
    break_rule("q keeps the rejected child")


@mutant("empty residual becomes NaN", "tests/decoding/test_sampled.py::test_an_exhausted_residual_is_no_nan[dtype0]")
def residual_nan() -> None:
    from eaglelab.decoding import residual

    residual._reduce = lambda p_BV, q_BV: (p_BV - q_BV).clamp(min=0) / (p_BV - q_BV).clamp(min=0).sum(-1, keepdim=True)


@mutant("impossible token accepted", "tests/decoding/test_sampled.py::test_impossible_children_are_never_accepted")
def impossible_accepted() -> None:
    from eaglelab.decoding import residual

    residual._passes = lambda px_B, qx_B, u_B: u_B.double() * qx_B <= px_B
