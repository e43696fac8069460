"""The kernel's arithmetic under Triton's interpreter; :mod:`tests.kernels.test_soft_targets` runs this file.

The interpreter is chosen when Triton is imported, so it needs a process of its own. It runs the threads of a program
one after the other: what they write over each other it cannot show.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from eaglelab.objectives.soft_targets import BY_TORCH, KERNEL, _disagreement, differentiable, load_kernel
from tests.kernels.conftest import Problem, check

_patch = interpreter._patch_lang_tensor


def _patch_and_index(tensor, scope):
    """NumPy from 2.5 on makes no number of an array of one element, as the interpreter's loops ask it to."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_and_index

SHAPES = [
    (2, 3, 1, 0),
    (3, 1, 1, 1),
    (4, 7, 7, 0),
    (3, 1, 7, 7),
    (3, 4, 1_000, 0),
    (2, 1, 1_000, 10),
    (2, 2, 4_096, 0),
    (2, 3, 4_097, 0),
    (2, 1, 4_097, 4_096),
    (1, 2, 50_000, 0),
    (1, 1, 50_000, 10),
    (1, 1, 262_144, 10),
]


@pytest.mark.parametrize(("m", "S", "V", "K"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_its_definition(m, S, V, K, dtype):
    check(Problem.drawn(m, S, V, K, dtype=dtype), load_kernel(), factor=3.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape(data):
    """Any spread and shift of the logits, rows without weight, and top tokens up to the whole vocabulary."""
    draw = data.draw
    m, S, V = draw(st.integers(1, 4)), draw(st.integers(1, 7)), draw(st.integers(1, 9_000))
    K = draw(st.integers(1, min(V, 4_096))) if S == 1 and draw(st.booleans()) else 0
    shift = draw(st.sampled_from([-30.0, 0.0, 30.0]))
    problem = Problem.drawn(m, S, V, K, seed=draw(st.integers(0, 99)), spread=draw(st.floats(0, 8)), shift=shift)
    check(problem, load_kernel(), factor=draw(st.sampled_from([1.0, -0.5])))


@pytest.mark.parametrize(("S", "K"), [(1, 12), (5, 0)])
def test_the_kernel_agrees_with_torch(S, K):
    for one, other in zip(
        Problem.drawn(3, S, 5_000, K).found(load_kernel()), Problem.drawn(3, S, 5_000, K).found(BY_TORCH), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_in_the_logits_memory_and_nothing_else_is_written():
    problem = Problem.drawn(3, 1, 5_000, 10)
    logit_mSV, others = problem.logit_mSV, (problem.q_mV, problem.weight_mS, *problem.top_mK)
    before = [x.clone() for x in others]
    *_, gradient_mSV = problem.found(load_kernel())
    assert gradient_mSV.data_ptr() == logit_mSV.data_ptr()
    assert all(one.equal(other) for one, other in zip(others, before, strict=True))


def test_neighbours_in_memory_are_left_alone():
    """Three rows of a larger tensor, vocabulary no multiple of anything."""
    problem = Problem.drawn(3, 1, 4_099, 10)
    room = torch.full((5, 1, 4_099), 7.0)
    room[1:4] = problem.logit_mSV
    problem.logit_mSV = room[1:4]
    check(problem, load_kernel())
    assert (room[0] == 7).all() and (room[4] == 7).all() and not (room[1:4] == 7).any()


def test_strided_inputs():
    whole = Problem.drawn(3, 2, 1_000)
    strided = Problem(*(torch.stack([x, x + 1], -1)[..., 0] for x in (whole.logit_mSV, whole.q_mV, whole.weight_mS)))
    assert not strided.logit_mSV.is_contiguous()
    check(strided, load_kernel())
    top = Problem.drawn(3, 1, 1_000, 4)
    top.top_mK = tuple(torch.stack([x, x], -1)[..., 0] for x in top.top_mK)
    check(top, load_kernel())
    one_weight = Problem.drawn(3, 2, 1_000)
    one_weight.weight_mS = torch.tensor([[0.5, 0.25]]).expand(3, 2)
    check(one_weight, load_kernel())


def test_rows_of_no_weight_have_no_gradient():
    problem = Problem.drawn(3, 2, 1_000)
    problem.weight_mS.zero_()
    loss, soft_mS, _, gradient_mSV = problem.found(load_kernel())
    assert loss == 0 and (soft_mS > 0).all() and (gradient_mSV == 0).all()


def test_a_top_weight_of_zero_leaves_the_first_term():
    with_top, without = Problem.drawn(3, 1, 1_000, 5, top_weight=0.0), Problem.drawn(3, 1, 1_000)
    check(with_top, load_kernel())
    torch.testing.assert_close(with_top.logit_mSV, without.found(load_kernel())[-1])


@pytest.mark.parametrize("S", [1, 3])
def test_no_rows(S):
    empty = Problem(torch.zeros(0, S, 10), torch.zeros(0, 10), torch.zeros(0, S))
    loss, soft_mS, top_mS, gradient_mSV = empty.found(load_kernel())
    assert loss == 0 and soft_mS.shape == top_mS.shape == (0, S) and gradient_mSV.shape == (0, S, 10)


def test_without_a_gradient_the_sums_alone_are_computed():
    problem, terms = Problem.drawn(3, 1, 5_000, 10), load_kernel().terms
    _, soft_mS, top_mS, _ = problem.exact()
    before = problem.logit_mSV.clone()
    given_all = (problem.logit_mSV, problem.q_mV, problem.weight_mS, problem.top_mK, problem.top_weight)
    found = terms(*given_all, False)
    torch.testing.assert_close(found[0].double(), soft_mS, rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1].double(), top_mS, rtol=1e-5, atol=0)
    assert found[2] is None and problem.logit_mSV.equal(before)


@pytest.mark.parametrize("place", [0, 4_500])
def test_a_logit_that_is_no_number_is_seen(place):
    problem = Problem.drawn(3, 1, 5_000)
    problem.weight_mS.fill_(1.0)
    problem.logit_mSV[1, 0, place] = float("nan")
    loss, soft_mS, _, gradient_mSV = problem.found(load_kernel())
    assert loss.isnan() and soft_mS.isnan().squeeze(1).tolist() == [False, True, False]
    assert gradient_mSV[1].isnan().all() and not gradient_mSV[::2].isnan().any()


def test_autograd_notices_who_wrote_over_what_it_keeps():
    logit_mV = torch.zeros(2, 9, requires_grad=True).exp()  # exp keeps its result for its backward
    other = Problem.drawn(2, 1, 9)
    loss, *_ = differentiable(load_kernel(), logit_mV[:, None], other.q_mV, other.weight_mS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("count", [1, 4_096, 10_001])
@pytest.mark.parametrize("factor", [1.0, -2.5, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_times_a_number(count, factor, dtype):
    room = torch.randn(count + 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, x = room.clone(), room[1:-1]
    expected = x * factor
    torch.testing.assert_close(load_kernel().multiply_(x, torch.tensor(factor)), expected, equal_nan=True)
    assert room[0] == before[0] and room[-1] == before[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_probation_is_passed(dtype):
    assert _disagreement(torch.device("cpu"), dtype) <= KERNEL.bound(dtype)
