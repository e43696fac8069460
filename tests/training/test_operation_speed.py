"""Operations in all their implementations: who takes part, what is divided by what, what an interrupt leaves."""

import pytest
import torch

from eaglelab.kernels import Kernel, kernels
from eaglelab.objectives import soft_targets
from eaglelab.objectives.soft_targets import BY_TORCH
from eaglelab.training.operation_speed import (
    Case,
    Operation,
    measure_operation,
    operation_table,
    soft_cross_entropy_speed,
)

CPU = torch.device("cpu")


def never(device, dtype):
    raise AssertionError("tried")


def operation(*cases, supports=lambda device, dtype: False):
    return Operation("adding", Kernel("the sum", supports, never, lambda dtype: 0.0), cases)


def counted(calls, name, stop_at=None):
    def call():
        calls.append(name)
        if len(calls) == stop_at:
            raise KeyboardInterrupt

    return call


def test_implementations_alternate_and_are_divided_by_eager():
    calls = []
    case = Case("small", torch.float32, 8, lambda: {name: counted(calls, name) for name in ("eager", "other")})
    one = operation(case)
    (found,), interrupted = measure_operation(one, CPU, repetitions=2, progress=False)
    assert calls == ["eager", "other", "other", "eager", "eager", "other"] and not interrupted
    pairs = zip(found.seconds["eager"].values, found.seconds["other"].values, strict=True)
    assert found.over_eager["other"].values == pytest.approx([eager / other for eager, other in pairs])
    assert found.of_copy("other") == pytest.approx(8 / found.seconds["other"].median / found.copy_bytes)
    assert found.refusal == "it is not written for cpu and torch.float32"
    table = operation_table(one, [found])
    assert "adding" in table and "small" in table
    assert table.endswith("the sum is not usable here: it is not written for cpu and torch.float32")


def test_an_interrupt_leaves_whole_cases():
    calls = []
    first, second = (
        Case(name, torch.float32, 8, lambda stop=stop: {"eager": counted(calls, "eager", stop)})
        for name, stop in (("first", None), ("second", 4))
    )
    found, interrupted = measure_operation(operation(first, second), CPU, repetitions=1, progress=False)
    assert [one.case.name for one in found] == ["first"] and interrupted


def test_the_loss_is_measured_by_its_kernel_where_that_is_usable(monkeypatch):
    agrees = Kernel("the loss", lambda device, dtype: True, lambda device, dtype: 0.0, lambda dtype: 0.0)
    monkeypatch.setattr(soft_targets, "KERNEL", agrees)
    monkeypatch.setattr(soft_targets, "load_kernel", lambda: BY_TORCH)
    one = soft_cross_entropy_speed(2, [(9, 1), (5, 3)], [torch.float32], CPU)
    found, _ = measure_operation(one, CPU, repetitions=1, progress=False)
    assert [list(case.seconds) for case in found] == [["eager", "kernel"]] * 2
    assert [case.refusal for case in found] == [None, None]
    assert "not usable" not in operation_table(one, found)
    with kernels("torch"):
        (alone,), _ = measure_operation(
            soft_cross_entropy_speed(2, [(9, 1)], [torch.float32], CPU), CPU, repetitions=1, progress=False
        )
    assert list(alone.seconds) == ["eager"] and alone.refusal == "kernels=torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_measured_is_the_gradient_of_the_logits_type(dtype):
    (case,) = soft_cross_entropy_speed(3, [(40, 2)], [dtype], CPU).cases
    (gradient_mSV,) = case.prepare()["eager"]()
    assert gradient_mSV.shape == (3, 2, 40) and gradient_mSV.dtype == dtype
    assert gradient_mSV.sum(-1).abs().max() < 0.02 and gradient_mSV.abs().max() > 0.02
