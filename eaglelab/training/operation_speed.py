"""Single operations in all their implementations, alternated in one process on one device.

A table is an :class:`Operation`; another one needs no more than cases of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eaglelab.evaluation.alternation import Spread, alternate, ratio
from eaglelab.kernels import Kernel
from eaglelab.objectives import soft_targets
from eaglelab.objectives.soft_targets import BY_TORCH, Implementation, differentiable, terms_by_torch
from eaglelab.training.work import copy_bytes, seconds_per_call

EAGER, COMPILED, KERNEL = "eager", "compiled", "kernel"


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape and number type.

    Attributes:
        name: what tells it from the other cases of its table.
        dtype: that the kernel has to be usable for.
        least_bytes: of what is given, read once, and of what is asked for, written once.
        prepare: makes tensors on the device and returns the implementations by name, :data:`EAGER` first; each can be
            called again and again. The tensors live as long as the case is measured.
    """

    name: str
    dtype: torch.dtype
    least_bytes: int
    prepare: Callable[[], dict[str, Callable[[], object]]]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A table: its title, the kernel in question, and what it is measured on."""

    name: str
    kernel: Kernel
    cases: Sequence[Case]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One case.

    Attributes:
        seconds: of a call, by implementation.
        over_eager: eager's time over an implementation's, repetition by repetition: how many times as fast.
        copy_bytes: per second, of a plain copy between the calls.
        refusal: why the kernel is not among them; None: it is.
    """

    case: Case
    seconds: dict[str, Spread]
    over_eager: dict[str, Spread]
    copy_bytes: float
    refusal: str | None

    def of_copy(self, name: str) -> float:
        """The copy's time for the least bytes over an implementation's; 1 is as fast as memory allows."""
        return self.case.least_bytes / self.seconds[name].median / self.copy_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "least_bytes": self.case.least_bytes,
            "copy_bytes_per_s": self.copy_bytes,
            "refusal": self.refusal,
            "implementations": {
                name: {
                    "seconds": spread.to_dict(),
                    "over_eager": self.over_eager[name].to_dict(),
                    "bytes_per_s": self.case.least_bytes / spread.median,
                    "share_of_copy": self.of_copy(name),
                }
                for name, spread in self.seconds.items()
            },
        }


def measure_operation(
    operation: Operation, device: torch.device, *, repetitions: int = 5, progress: bool = True
) -> tuple[list[Measured], bool]:
    """All cases, one after the other, and whether an interrupt (Ctrl-C) left the rest out."""
    found: list[Measured] = []
    for case in operation.cases:
        refusal = operation.kernel.refusal(device, case.dtype)
        contestants = {name: functools.partial(seconds_per_call, call, device) for name, call in case.prepare().items()}
        copied = {"copy": lambda: copy_bytes(device=str(device))}
        runs, interrupted = alternate(contestants | copied, repetitions, progress=case.name if progress else None)
        if interrupted:
            return found, True
        copy = statistics.median(runs.pop("copy"))
        over_eager = {name: ratio(runs[EAGER], seconds) for name, seconds in runs.items()}
        found.append(Measured(case, {k: Spread.of(v) for k, v in runs.items()}, over_eager, copy, refusal))
    return found, False


def operation_table(operation: Operation, measured: Sequence[Measured]) -> str:
    """Plain text: one line per implementation, and one for every reason why a kernel is not among them."""
    width = max(len(one.case.name) for one in measured) + 2
    lines = [
        operation.name,
        f"{'':<{width}}{'':<10}{'ms':>9}{'quartiles':>18}{'GB/s':>8}{'of copy':>9}   times as fast as eager",
    ]
    for one in measured:
        for name, spread in one.seconds.items():
            quartiles = f"{1e3 * spread.low:.2f} to {1e3 * spread.high:.2f}"
            lines.append(
                f"{one.case.name if name == EAGER else '':<{width}}{name:<10}{1e3 * spread.median:>9.2f}{quartiles:>18}"
                f"{one.case.least_bytes / spread.median / 1e9:>8.1f}{one.of_copy(name):>9.0%}"
                f"   {one.over_eager[name].times() if name != EAGER else ''}".rstrip()
            )
    reasons = dict.fromkeys(one.refusal for one in measured if one.refusal is not None)
    lines += [f"{operation.kernel.name} is not usable here: {reason}" for reason in reasons]
    return "\n".join(lines)


# ---- the soft cross entropy --------------------------------------------------------------------------------------


def soft_cross_entropy_speed(
    rows: int,
    shapes: Sequence[tuple[int, int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    compiled: bool = False,
) -> Operation:
    """Loss and gradient on given logits and distributions.

    Args:
        rows: of a chunk.
        shapes: (vocabulary, rollout steps) of each case.
        dtypes: of the logits and their gradient; conversions that an implementation needs are part of its time.
        compiled: measure the same PyTorch operations behind ``torch.compile``, too.
    """
    cases = [
        Case(
            f"{str(dtype).removeprefix('torch.')}, V {V:,}, {S} {'step' if S == 1 else 'steps'}",
            dtype,
            rows * V * (2 * S * dtype.itemsize + torch.float32.itemsize),
            _Loss(rows, S, V, dtype, device, compiled),
        )
        for V, S in shapes
        for dtype in dtypes
    ]
    return Operation(f"soft cross entropy and its gradient, {rows:,} rows", soft_targets.KERNEL, cases)


@dataclasses.dataclass(frozen=True)
class _Loss:
    rows: int
    steps: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    compiled: bool

    def __call__(self) -> dict[str, Callable[[], object]]:
        m, S, V = self.rows, self.steps, self.vocabulary
        logit_mSV = torch.randn(m, S, V, device=self.device, dtype=self.dtype).requires_grad_()
        q_mV = torch.randn(m, V, device=self.device).softmax(-1)
        weight_mS = torch.ones(m, S, device=self.device)

        def gradient(implementation: Implementation, dtype: torch.dtype) -> Callable[[], object]:
            def call() -> object:  # the logits become gradients, and those the next call's logits: no copy is timed
                loss, *_ = differentiable(implementation, logit_mSV.to(dtype), q_mV, weight_mS)
                return torch.autograd.grad(loss, logit_mSV)

            return call

        found = {EAGER: gradient(BY_TORCH, q_mV.dtype)}
        if self.compiled:
            torch.compiler.reset()  # it gives up on functions of many shapes
            found[COMPILED] = gradient(
                Implementation(torch.compile(_converting, dynamic=False), torch.Tensor.mul_), self.dtype
            )
        if soft_targets.KERNEL.usable(self.device, self.dtype):
            found[KERNEL] = gradient(soft_targets.load_kernel(), self.dtype)
        return found


def _converting(logit_mSV: Any, q_mV: Any, *rest: Any) -> Any:
    """As without ``torch.compile``, from logits of any type to a gradient of theirs; conversions can be fused."""
    soft_mS, top_mS, grad_mSV = terms_by_torch(logit_mSV.to(q_mV.dtype), q_mV, *rest)
    return soft_mS, top_mS, None if grad_mSV is None else grad_mSV.to(logit_mSV.dtype)
