"""Given logits and distributions, and the loss written from its definition."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


@dataclass
class Problem:
    """Shapes as in :func:`~eaglelab.objectives.soft_targets.soft_cross_entropy`; q adds up to 1 to fp32's rounding."""

    logit_mSV: Tensor
    q_mV: Tensor
    weight_mS: Tensor
    top_mK: tuple[Tensor, Tensor] | None = None
    top_weight: float = 0.0

    @classmethod
    def drawn(
        cls, m: int, S: int, V: int, K: int = 0, *, dtype=torch.float32, seed=0, spread=3.0, shift=0.0, top_weight=0.7
    ) -> Problem:
        """Every third weight is 0."""
        g = torch.Generator().manual_seed(seed)
        logit_mSV = (spread * torch.randn(m, S, V, generator=g) + shift).to(dtype)
        q_mV = (spread * torch.randn(m, V, generator=g)).double().softmax(-1).float()
        weight_mS = torch.rand(m, S, generator=g)
        weight_mS.view(-1)[::3] = 0.0
        top = tuple(q_mV.topk(K)) if K else None
        return cls(logit_mSV, q_mV, weight_mS, top, top_weight if K else 0.0)

    def to(self, device: str) -> Problem:
        top = None if self.top_mK is None else tuple(x.to(device) for x in self.top_mK)
        return Problem(*(x.to(device) for x in (self.logit_mSV, self.q_mV, self.weight_mS)), top, self.top_weight)

    def exact(self, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, its terms [m, S] and the gradient of ``factor`` times it, in float64."""
        x_mSV, q_mV, weight_mS = (x.double() for x in (self.logit_mSV, self.q_mV, self.weight_mS))
        x_mSV.requires_grad_()
        log_p_mSV = x_mSV - x_mSV.exp().sum(-1, keepdim=True).log()
        soft_mS, top_mS = -(q_mV[:, None] * log_p_mSV).sum(-1), torch.zeros_like(weight_mS)
        if self.top_mK is not None:
            kept_mK, id_mK = self.top_mK
            top_mS = -(kept_mK.double() * log_p_mSV[:, 0].gather(-1, id_mK)).sum(-1, keepdim=True)
        loss = (weight_mS * soft_mS).sum() + self.top_weight * top_mS.sum()
        (gradient_mSV,) = torch.autograd.grad(factor * loss, x_mSV)
        return loss.detach(), soft_mS.detach(), top_mS.detach(), gradient_mSV

    def found(self, implementation, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same by an implementation; the logits are written over."""
        from eaglelab.objectives.soft_targets import differentiable

        logit_mSV = self.logit_mSV.detach().requires_grad_()
        loss, soft_mS, top_mS = differentiable(
            implementation, logit_mSV, self.q_mV, self.weight_mS, self.top_mK, self.top_weight
        )
        (gradient_mSV,) = torch.autograd.grad(factor * loss, logit_mSV)
        return loss.detach(), soft_mS, top_mS, gradient_mSV


def check(problem: Problem, implementation, factor: float = 1.0) -> None:
    """An implementation against the definition.

    Sums and what gradients are differences of (weighted p and q) to fp32's rounding; gradients themselves are rounded
    twice to the logits' type, by the kernel and in the product with ``factor``; the interpreter rounds to zero.
    """
    exact, dtype = problem.exact(factor), problem.logit_mSV.dtype
    weight = abs(factor) * (problem.weight_mS.max().item() + problem.top_weight)
    part = weight * max(problem.q_mV.max().item(), problem.logit_mSV.double().softmax(-1).max().item())
    loss, soft_mS, top_mS, gradient_mSV = problem.found(implementation, factor)
    assert gradient_mSV.dtype == dtype
    for one, other in zip((loss, soft_mS, top_mS), exact, strict=False):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    kind = torch.finfo(dtype)
    rtol, least = (0.0, 0.0) if dtype == torch.float32 else (2 * kind.eps, 2 * abs(factor) * kind.tiny * kind.eps)
    torch.testing.assert_close(gradient_mSV.double(), exact[-1], rtol=rtol, atol=2e-6 * part + least)


def run_file(name: str, **environment: str) -> None:
    """The tests of a file beside this one, in a process with these environment variables."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / "tests" / "kernels" / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
