"""Kernels on probation: who runs, what is said, and that a loss is right whatever the verdict."""

import threading
import warnings

import pytest
import torch
from omegaconf import OmegaConf

from eaglelab.kernels import Kernel, kernels
from eaglelab.objectives import soft_targets
from eaglelab.objectives.soft_targets import Implementation, as_taken, soft_cross_entropy, terms_by_torch
from eaglelab.training import job

CPU = torch.device("cpu")


class Tried:
    """A kernel's probation that counts how often it is asked; ``found`` is a number or an error."""

    def __init__(self, found):
        self.found, self.asked = found, []

    def __call__(self, device, dtype):
        self.asked.append((device, dtype))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def kernel(found, supports=lambda device, dtype: True, bound=1e-3):
    tried = Tried(found)
    return Kernel("the sum", supports, tried, lambda dtype: bound), tried


def silently(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


@pytest.mark.parametrize("found", [0.0, 1e-3])
def test_one_that_agrees_is_used_without_a_word(found):
    one, tried = kernel(found)
    assert silently(lambda: one.usable(CPU, torch.float32))
    assert silently(lambda: one.usable(CPU, torch.float32))
    assert one.refusal(CPU, torch.float32) is None
    assert tried.asked == [(CPU, torch.float32)]


@pytest.mark.parametrize("found", [2e-3, float("inf"), float("nan")])
def test_one_that_disagrees_is_left_out_with_one_warning(found):
    one, tried = kernel(found)
    with pytest.warns(UserWarning, match="left out") as said:
        assert not one.usable(CPU, torch.float32)
    assert not silently(lambda: one.usable(CPU, torch.float32))
    (text,) = [str(warning.message) for warning in said]
    assert text.startswith("the sum is left out on cpu for torch.float32: its results differ by")
    assert "1e-03 is allowed" in text and text.endswith("PyTorch's own operations go on in its place")
    assert "differ by" in one.refusal(CPU, torch.float32)
    assert len(tried.asked) == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ImportError("No module named 'triton'"), "does not run: ImportError: No module named 'triton';"),
        (RuntimeError("\n first line \n second"), "does not run: RuntimeError: first line;"),
        (AssertionError(), "does not run: AssertionError;"),
    ],
)
def test_one_that_cannot_run_is_left_out_and_says_why(error, told):
    one, _ = kernel(error)
    with pytest.warns(UserWarning, match="left out on cpu for torch.float32: it does not run: ") as said:
        assert not one.usable(CPU, torch.float32)
    assert told in str(said[0].message) and "second" not in str(said[0].message)


def test_an_interrupt_is_no_verdict():
    one, tried = kernel(0.0)
    tried.found = None

    def stop(device, dtype):
        raise KeyboardInterrupt

    one.disagreement = stop
    with pytest.raises(KeyboardInterrupt):
        one.usable(CPU, torch.float32)
    one.disagreement = tried
    tried.found = 0.0
    assert one.usable(CPU, torch.float32)


def test_every_device_and_type_has_a_verdict_of_its_own():
    one, tried = kernel(0.0)
    one.disagreement = lambda device, dtype: tried(device, dtype) + (dtype == torch.bfloat16)
    with pytest.warns(UserWarning, match="bfloat16"):
        found = [one.usable(torch.device(*place), dtype) for place in (("cpu",), ("cpu", 0)) for dtype in TYPES]
    assert found == [True, False, True, False]
    assert len(tried.asked) == 4


TYPES = (torch.float32, torch.bfloat16)


def test_what_it_is_not_written_for_is_not_tried():
    one, tried = kernel(0.0, supports=lambda device, dtype: device.type == "cuda")
    assert not silently(lambda: one.usable(CPU, torch.float32))
    assert not tried.asked
    assert one.refusal(CPU, torch.float32) == "it is not written for cpu and torch.float32"


def test_torch_uses_no_kernel_and_tries_none():
    one, tried = kernel(0.0)
    with kernels("torch"):
        assert not one.usable(CPU, torch.float32)
        assert one.refusal(CPU, torch.float32) == "kernels=torch"
        with kernels("auto"):
            assert one.usable(CPU, torch.float32)
        assert not one.usable(CPU, torch.float32)
    assert one.usable(CPU, torch.float32)
    with pytest.raises(RuntimeError), kernels("torch"):
        raise RuntimeError
    assert one.usable(CPU, torch.float32)
    assert len(tried.asked) == 1


def test_a_choice_holds_in_threads_too():
    """Those of autograd and of a loader are no others than the one that began the training."""
    one, _ = kernel(0.0)
    found = []
    with kernels("torch"):
        thread = threading.Thread(target=lambda: found.append(one.usable(CPU, torch.float32)))
        thread.start()
        thread.join()
    assert found == [False]


@pytest.mark.parametrize("choice", ["fast", "", None, 1])
def test_another_choice_is_refused(choice):
    with pytest.raises(ValueError, match="is not one of auto, torch"), kernels(choice):
        pass


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_a_probation_can_differentiate_in_full_precision_wherever_it_is_asked_for(surroundings):
    def slope_error(device, dtype):
        x = torch.ones(3, 3, device=device, dtype=dtype, requires_grad=True)
        product = x @ x
        assert product.dtype == dtype
        (slope,) = torch.autograd.grad(product.sum(), x)
        return float((slope - 6).abs().max())

    one, _ = kernel(0.0)
    one.disagreement = slope_error
    with surroundings():
        assert silently(lambda: one.usable(CPU, torch.float32))


# ---- the loss ---------------------------------------------------------------------------------------------------


class StandIn:
    """In a kernel's place: PyTorch's operations, counted; ``wrong`` is added to every gradient."""

    def __init__(self, wrong=0.0):
        self.wrong, self.calls, self.types = wrong, 0, set()

    def terms(self, logit_mSV, q_mV, weight_mS, top_mK, top_weight, gradient):
        self.calls += 1
        self.types.add(logit_mSV.dtype)
        soft_mS, top_mS, grad_mSV = terms_by_torch(logit_mSV.float(), q_mV, weight_mS, top_mK, top_weight, gradient)
        return soft_mS, top_mS, None if grad_mSV is None else (grad_mSV + self.wrong).to(logit_mSV.dtype)


@pytest.fixture
def stand_in(monkeypatch):
    """The loss's kernel, as if it were one for the CPU."""

    def put(wrong=0.0):
        one = StandIn(wrong)
        found = Kernel(
            "the loss", lambda device, dtype: True, soft_targets.KERNEL.disagreement, soft_targets.KERNEL.bound
        )
        monkeypatch.setattr(soft_targets, "KERNEL", found)
        monkeypatch.setattr(soft_targets, "load_kernel", lambda: Implementation(one.terms, torch.Tensor.mul_))
        return one

    return put


def loss_and_gradient(dtype=torch.float32, top_k=3, S=1):
    g = torch.Generator().manual_seed(1)
    logit, weight = torch.randn(4, S, 50, generator=g).to(dtype).requires_grad_(), torch.rand(4, S, generator=g)
    q = torch.randn(4, 50, generator=g).softmax(-1)
    top = q.topk(top_k) if top_k else None
    loss, soft, top_term = soft_cross_entropy(as_taken(logit * 1, q.dtype), q, weight, top, 0.4)
    return loss.detach(), soft, top_term, *torch.autograd.grad(loss * 2, logit)


@pytest.mark.parametrize(("top_k", "S"), [(3, 1), (0, 1), (0, 5)])
def test_a_kernel_that_agrees_computes_the_loss(stand_in, top_k, S):
    expected = loss_and_gradient(top_k=top_k, S=S)
    one = stand_in()
    torch.testing.assert_close(silently(lambda: loss_and_gradient(top_k=top_k, S=S)), expected)
    tried = one.calls - 1
    silently(lambda: loss_and_gradient(top_k=top_k, S=S))
    assert one.calls == tried + 2
    with kernels("torch"):
        torch.testing.assert_close(loss_and_gradient(top_k=top_k, S=S), expected, rtol=0, atol=0)
    assert one.calls == tried + 2


def test_a_kernel_that_disagrees_is_noticed_and_changes_nothing(stand_in):
    expected = loss_and_gradient()
    stand_in(wrong=1e-3)
    with pytest.warns(UserWarning, match="the loss is left out on cpu for torch.float32: its results differ by"):
        found = loss_and_gradient()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_kernel_that_cannot_be_loaded_changes_nothing(stand_in, monkeypatch):
    expected = loss_and_gradient()
    stand_in()

    def missing():
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(soft_targets, "load_kernel", missing)
    with pytest.warns(UserWarning, match="it does not run: ImportError: No module named 'triton'"):
        found = loss_and_gradient()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_logits_in_low_precision_reach_the_kernel_as_they_are(stand_in):
    """And the gradient is what a conversion in front of PyTorch's operations would have given."""
    expected = loss_and_gradient(torch.bfloat16)
    one = stand_in()
    found = loss_and_gradient(torch.bfloat16)
    torch.testing.assert_close(found, expected)
    assert one.types == {torch.bfloat16}
    assert found[0].dtype == found[1].dtype == torch.float32 and found[-1].dtype == torch.bfloat16


def test_more_top_tokens_than_the_kernel_holds_are_left_to_torch(stand_in, monkeypatch):
    expected = loss_and_gradient(torch.bfloat16)
    one = stand_in()
    monkeypatch.setattr(soft_targets, "MOST_TOP", 2)
    assert soft_targets.KERNEL.usable(CPU, torch.bfloat16)
    tried = one.calls
    torch.testing.assert_close(loss_and_gradient(torch.bfloat16), expected)
    assert one.calls == tried


def test_a_probation_leaves_the_random_stream_alone(stand_in):
    stand_in()
    before = torch.get_rng_state()
    assert soft_targets.KERNEL.usable(CPU, torch.float32)
    assert torch.get_rng_state().equal(before)


def test_on_a_cpu_the_loss_is_torch_s_own():
    assert "not written for cpu" in soft_targets.KERNEL.refusal(CPU, torch.float32)


@pytest.mark.parametrize(("settings", "used"), [({"kernels": "torch"}, False), ({"kernels": "auto"}, True), ({}, True)])
def test_a_whole_training_is_held_to_its_choice(settings, used, monkeypatch, tmp_path):
    one, _ = kernel(0.0)
    monkeypatch.setattr(job, "_train_once", lambda *given: one.usable(CPU, torch.float32))
    assert job.train_once(OmegaConf.create(settings), tmp_path) is used
    assert one.usable(CPU, torch.float32)


def test_a_training_with_another_choice_does_not_begin(tmp_path):
    with pytest.raises(ValueError, match="kernels='fast' is not one of auto, torch"):
        job.train_once(OmegaConf.create({"kernels": "fast"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
