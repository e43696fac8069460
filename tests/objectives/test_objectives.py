"""Losses and noise against their definitions."""

import pytest
import torch

from eaglelab.objectives import chunked_sum, distill, feature_noise, smooth_l1
from eaglelab.objectives.chunked import chunk_rows
from eaglelab.objectives.soft_targets import soft_cross_entropy


def problem(M=7, d=5, V=11, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    predicted = torch.randn(M, d, generator=g, dtype=dtype, requires_grad=True)
    teacher = torch.randn(M, d, generator=g, dtype=dtype)
    weight = torch.randn(V, d, generator=g, dtype=dtype)
    return predicted, teacher, weight


def literal_soft_ce(predicted, teacher, weight):
    q = (teacher @ weight.T).softmax(-1)
    return -(q * (predicted @ weight.T).log_softmax(-1)).sum()


def test_smooth_l1_is_averaged_over_the_width_and_summed_over_rows():
    """A residual of 2.2 costs 1.7 at beta 1, one of 0.5 costs 0.125."""
    rows = smooth_l1(torch.tensor([[2.2, 0.5], [0.0, -2.2], [-0.5, 0.0]]), torch.zeros(3, 2))
    assert rows == pytest.approx((1.7 + 0.125 + 1.7 + 0.125) / 2)
    assert smooth_l1(torch.tensor([[2.2]]), torch.zeros(1, 1), beta=4.0) == pytest.approx(2.2**2 / 8)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_soft_cross_entropy_equals_its_definition_in_value_and_gradient(chunk):
    predicted, teacher, weight = problem()
    result = distill(predicted, teacher, lambda x: x @ weight.T, chunk=chunk)
    exact = literal_soft_ce(predicted, teacher, weight)
    torch.testing.assert_close(result.loss, exact)
    # an outer factor reaches the gradient
    (ours,) = torch.autograd.grad(result.loss * 3, predicted)
    (expected,) = torch.autograd.grad(exact * 3, predicted)
    torch.testing.assert_close(ours, expected)


def test_mixed_precision_rounds_logits_and_no_sum():
    """Softmax, log-softmax and sums are fp32 under autocast, too: the loss of given logits is that of fp64."""
    g = torch.Generator().manual_seed(0)
    logit, taught = (3 * torch.randn(16, 2000, generator=g) for _ in range(2))
    q = taught.double().softmax(-1)
    exact = -(q * logit.double().log_softmax(-1)).sum(-1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, soft, _ = soft_cross_entropy(logit[:, None].clone(), q.float(), torch.ones(16, 1))
    torch.testing.assert_close(soft.squeeze(1).double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(total.double(), exact.sum(), rtol=1e-5, atol=0)


def test_gradient_vanishes_where_drafter_equals_teacher():
    """At p = q the loss is the teacher's entropy and stationary."""
    _, teacher, weight = problem()
    same = teacher.clone().requires_grad_()
    result = distill(same, teacher, lambda x: x @ weight.T)
    q = (teacher @ weight.T).softmax(-1)
    torch.testing.assert_close(result.soft, -(q * q.log()).sum())
    (grad,) = torch.autograd.grad(result.loss, same)
    assert grad.abs().max() < 1e-5
    assert result.hits_M.all()


def test_hits_and_recall():
    weight = torch.eye(4)
    teacher = torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 9.0, 0]])
    predicted = torch.tensor([[5.0, 4, 0, 0], [5.0, 4, 0, 0], [5.0, 4, 0, 1]])
    result = distill(predicted, teacher, lambda x: x @ weight.T, recall_k=2)
    assert result.hits_M.tolist() == [True, False, False]
    assert result.recall == 2


def test_low_precision_states_are_summed_in_fp32():
    predicted, teacher, weight = problem(M=64)
    low = predicted.detach().bfloat16().requires_grad_()
    result = distill(low, teacher.bfloat16(), lambda x: x @ weight.bfloat16().T, chunk=8)
    assert result.soft.dtype == torch.float32
    exact = literal_soft_ce(low.float(), teacher.bfloat16().float(), weight.bfloat16().float())
    torch.testing.assert_close(result.soft, exact, rtol=2e-2, atol=0)
    (grad,) = torch.autograd.grad(result.loss, low)
    assert grad.dtype == torch.bfloat16


def test_no_rows_gives_zero_and_an_empty_gradient():
    _, _, weight = problem()
    predicted = torch.zeros(0, 5, requires_grad=True)
    result = distill(predicted, torch.zeros(0, 5), lambda x: x @ weight.T)
    assert result.soft == 0
    assert smooth_l1(predicted, torch.zeros(0, 5)) == 0
    assert torch.autograd.grad(result.loss, predicted)[0].shape == (0, 5)


def test_uniform_noise_has_the_paper_s_interval_and_variance():
    noise = feature_noise((4, 100, 50), "paper_uniform", generator=torch.Generator().manual_seed(0))
    assert noise.abs().max() <= 0.1
    assert noise.abs().max() > 0.0999
    assert noise.mean().abs() < 0.002  # 0.0577 / sqrt(20000) = 0.0004
    assert noise.var().item() == pytest.approx(0.2**2 / 12, rel=0.03)


def test_length_scaled_noise_is_the_uniform_one_at_512_and_scales_with_512_over_length():
    draw = {"law": "length_scaled", "scale": 0.1}
    shape = (1, 3, 8)
    length = torch.tensor([[512, 256, 1024]])
    uniform = feature_noise(shape, "paper_uniform", generator=torch.Generator().manual_seed(3))
    scaled = feature_noise(shape, length_BR=length, generator=torch.Generator().manual_seed(3), **draw)
    torch.testing.assert_close(scaled[0, 0], uniform[0, 0])
    torch.testing.assert_close(scaled[0, 1], uniform[0, 1] * 2)
    torch.testing.assert_close(scaled[0, 2], uniform[0, 2] / 2)


def test_gaussian_noise_and_none():
    noise = feature_noise((20_000,), "gaussian", scale=0.3, generator=torch.Generator().manual_seed(0))
    assert noise.std().item() == pytest.approx(0.3, rel=0.03)
    assert feature_noise((2, 2), "none") is None


def test_a_scale_of_zero_is_noise_of_nothing():
    assert feature_noise((3, 4), "paper_uniform", scale=0.0).abs().max() == 0


@pytest.mark.parametrize("vocabulary", [8_192, 32_000, 49_152, 151_936])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_chunk_s_logits_fill_32_mib_or_are_the_least_rows_that_a_product_needs(vocabulary, steps):
    rows, mib_of_row = chunk_rows(vocabulary, steps), steps * vocabulary * 4 / 2**20
    assert rows * mib_of_row <= 32 or 256 <= rows * steps < 256 + steps
    assert (rows + 1) * mib_of_row > 32


def test_small_vocabularies_have_chunks_of_1024_rows():
    assert chunk_rows(2_048) == chunk_rows(16) == 1024


def test_noise_errors():
    with pytest.raises(ValueError, match="noise law 'uniform' is not one of none, paper_uniform"):
        feature_noise((1,), "uniform")
    with pytest.raises(ValueError, match="scale must be >= 0"):
        feature_noise((1,), "gaussian", scale=-1.0)
    with pytest.raises(ValueError, match="needs the length"):
        feature_noise((1, 1, 1), "length_scaled")


def test_top_k_term_is_not_renormalised():
    predicted, teacher, weight = problem()
    q = (teacher @ weight.T).softmax(-1)
    log_p = (predicted @ weight.T).log_softmax(-1)
    kept = q.topk(3, -1)
    exact = -(kept.values * log_p.gather(-1, kept.indices)).sum()
    settings = {"soft_weight": 0.1, "top_weight": 2.0, "top_k": 3, "chunk": 4}
    result = distill(predicted, teacher, lambda x: x @ weight.T, **settings)
    torch.testing.assert_close(result.top, exact.detach())
    torch.testing.assert_close(result.loss, 0.1 * result.soft + 2.0 * exact)
    (ours,) = torch.autograd.grad(result.loss, predicted)
    (expected,) = torch.autograd.grad(0.1 * literal_soft_ce(predicted, teacher, weight) + 2.0 * exact, predicted)
    torch.testing.assert_close(ours, expected)

    # renormalising divides every row by its own mass Z_K: another loss
    renormalised = distill(predicted, teacher, lambda x: x @ weight.T, renormalise=True, **settings)
    by_row = -(kept.values * log_p.gather(-1, kept.indices)).sum(-1) / kept.values.sum(-1)
    torch.testing.assert_close(renormalised.top, by_row.sum().detach())
    assert (renormalised.top - result.top).abs() > 0.1


@pytest.mark.parametrize("chunk", [3, 100])
def test_labels_replace_the_distribution_in_the_soft_term_alone(chunk):
    predicted, teacher, weight = problem()
    label = torch.tensor([0, 10, 3, 3, 7, 1, 0])
    q, log_p = (teacher @ weight.T).softmax(-1), (predicted @ weight.T).log_softmax(-1)
    kept = q.topk(3, -1)
    exact = -(0.1 * log_p.gather(-1, label[:, None]).sum()) - (kept.values * log_p.gather(-1, kept.indices)).sum()
    settings = {"soft_weight": 0.1, "top_weight": 1.0, "top_k": 3, "chunk": chunk}
    hard = distill(predicted, teacher, lambda x: x @ weight.T, label_M=label, **settings)
    soft = distill(predicted, teacher, lambda x: x @ weight.T, **settings)
    torch.testing.assert_close(hard.loss, exact)
    assert hard.top == soft.top
    assert hard.hits_M.equal(soft.hits_M)
    assert hard.recall == soft.recall
    (ours,) = torch.autograd.grad(hard.loss * 3, predicted)
    (expected,) = torch.autograd.grad(exact * 3, predicted)
    torch.testing.assert_close(ours, expected)


def test_teachers_are_not_written_over():
    """The gradient is formed where a chunk's distribution was; neither teachers nor a frozen head may change."""
    predicted, teacher, weight = problem()
    before = teacher.clone(), weight.clone()
    logits = teacher @ weight.T
    kept = logits.clone()
    distill(predicted, teacher, lambda x: x @ weight.T if x.requires_grad else logits, top_weight=1.0).loss.backward()
    assert teacher.equal(before[0]) and weight.equal(before[1]) and logits.equal(kept)


def test_top_k_of_the_whole_vocabulary_is_the_full_cross_entropy():
    predicted, teacher, weight = problem()
    result = distill(predicted, teacher, lambda x: x @ weight.T, top_weight=1.0, top_k=11)
    torch.testing.assert_close(result.top, result.soft)


@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_chunked_sum_gradcheck_with_trained_parameters(chunk):
    predicted, teacher, weight = problem(M=5, dtype=torch.float64)
    head = weight.clone().requires_grad_()

    def total(state, head):
        def loss_of(rows, piece):
            return ((rows @ head.T).log_softmax(-1) * teacher[piece, :1]).sum()

        return chunked_sum(loss_of, state, [head], chunk=chunk)

    assert torch.autograd.gradcheck(total, (predicted, head))
    frozen = weight.clone()
    (grad,) = torch.autograd.grad(total(predicted, frozen), predicted)
    (expected,) = torch.autograd.grad(((predicted @ frozen.T).log_softmax(-1) * teacher[:, :1]).sum(), predicted)
    torch.testing.assert_close(grad, expected)
    with torch.no_grad():
        torch.testing.assert_close(total(predicted, head), total(predicted, frozen))


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("renormalise", [False, True])
def test_what_one_pass_looked_up_serves_another(chunk, renormalise):
    """A second pass over some of the rows, in another order, gives what it gives alone: loss, measures and gradient."""
    predicted, teacher, weight = problem()
    settings = {"top_weight": 0.7, "top_k": 4, "renormalise": renormalise, "chunk": chunk}
    remember = []
    distill(predicted, teacher, lambda x: x @ weight.T, remember=remember, **settings)
    rows = torch.tensor([5, 0, 3])
    other = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = []
    for taught in (remember[0].of(rows), None):
        one = distill(other, teacher[rows], lambda x: x @ weight.T, taught=taught, **settings)
        (gradient,) = torch.autograd.grad(one.loss, other)
        found.append((one.loss.detach(), one.soft, one.top, one.hits_M, one.recall, gradient))
    torch.testing.assert_close(*found)
    assert float(found[0][2]) > 0
