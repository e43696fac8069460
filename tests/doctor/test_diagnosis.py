"""From counts to a verdict: a table is enough, no drafter is needed."""

import numpy as np
import pytest

from eaglelab.doctor import Examination, Hypothesis, Wiring, diagnose, report

P, ROOTS, K = 24, 40, 5


def hypothesis(name: str, **settings) -> Hypothesis:
    return Hypothesis(name, f"trained with {name}", f"change {name}", Wiring(("final",)), **settings)


def examination(*accuracies: float, floors: tuple[float, ...] = (), spread: float = 0.0, seed: int = 0) -> Examination:
    """Every step of every chain hits with the hypothesis' accuracy, which differs by conversation by ``spread``."""
    random = np.random.default_rng(seed)
    offset_P = random.normal(0, spread, P) if spread else np.zeros(P)
    uniform_PRK = random.uniform(size=(P, ROOTS, K))
    hits_HPRK = np.stack([uniform_PRK < np.clip(a + offset_P, 0, 1)[:, None, None] for a in accuracies])
    prefix_HPK = np.cumprod(hits_HPRK, axis=-1).sum(2)
    floors = floors or (0.25,) * len(accuracies)
    names = ["declared", *(f"fault{h}" for h in range(1, len(accuracies)))]
    hypotheses = [hypothesis(name, floor=floor) for name, floor in zip(names, floors, strict=True)]
    return Examination(hypotheses, np.full(P, ROOTS), prefix_HPK, hits_HPRK.sum(2))


def test_tau_and_one_step_accuracy_are_pooled():
    always = examination(1.0, 0.0)
    assert always.tau_H.tolist() == [1 + K, 1]
    assert always.one_step_H.tolist() == [1, 0]


def test_a_healthy_drafter_is_left_alone():
    diagnosis = diagnose(examination(0.8, 0.78, 0.5, 0.1))
    assert diagnosis.verdict == "as_declared"
    assert diagnosis.best is diagnosis.declared
    assert diagnosis.sureness > 0.95
    assert "the wiring is the declared one" in report(diagnosis)


def test_a_fault_is_named_with_its_way_out():
    diagnosis = diagnose(examination(0.3, 0.5, 0.8, 0.1))
    assert diagnosis.verdict == "other_wiring"
    assert diagnosis.best.hypothesis.name == "fault2"
    assert diagnosis.sureness == 1
    low, high = diagnosis.best.gain_interval
    assert low < diagnosis.best.gain < high
    assert diagnosis.rivals == ()
    said = report(diagnosis)
    assert "trained with fault2" in said
    assert "what to change: change fault2" in said


def test_two_readings_that_do_equally_well_are_both_told():
    equal = examination(0.3, 0.8, 0.8)
    diagnosis = diagnose(equal)
    other = {"fault1": "fault2", "fault2": "fault1"}[diagnosis.best.hypothesis.name]
    assert [one.hypothesis.name for one in diagnosis.rivals] == [other]
    assert f"not told apart from it: {other}" in report(diagnosis)


def test_where_nothing_fits_it_says_so():
    diagnosis = diagnose(examination(0.02, 0.15, 0.1))
    assert diagnosis.verdict == "no_wiring_fits"
    assert "another target" in report(diagnosis)


def test_being_told_the_answer_helps_any_drafter_and_proves_nothing():
    """A wiring that shows the token to predict must be nearly always right before it is believed."""
    assert diagnose(examination(0.05, 0.4, floors=(0.25, 0.6))).verdict == "no_wiring_fits"
    assert diagnose(examination(0.3, 0.4, floors=(0.25, 0.6))).verdict == "as_declared"
    assert diagnose(examination(0.3, 0.9, floors=(0.25, 0.6))).best.hypothesis.name == "fault1"


@pytest.mark.parametrize("seed", range(8))
def test_no_fault_is_invented(seed):
    """Twenty readings as good as the declared one, over conversations of very different difficulty."""
    assert diagnose(examination(*[0.6] * 21, spread=0.2, seed=seed)).verdict != "other_wiring"
