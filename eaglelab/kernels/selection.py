"""Which implementation of an operation runs: PyTorch's, or a kernel that has proved itself on this device.

A kernel is written for one kind of device, and compiled at its first use by tools that are not always there. So it is
on probation: before its first use on a device, and for each number type, it is run beside the PyTorch implementation on
small random tensors. If it cannot be compiled there, or says something else, PyTorch's goes on, and a warning says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

KernelChoice = Literal["auto", "torch"]
KERNEL_CHOICES: tuple[KernelChoice, ...] = get_args(KernelChoice)
_choice: KernelChoice = "auto"


@contextmanager
def kernels(choice: KernelChoice) -> Iterator[None]:
    """Within it ``auto`` uses kernels that are on trial no more, ``torch`` none.

    Raises:
        ValueError: another choice.
    """
    global _choice
    if choice not in KERNEL_CHOICES:
        raise ValueError(
            f"kernels={choice!r} is not one of {', '.join(KERNEL_CHOICES)}; torch is PyTorch's own operations"
        )
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


@dataclass
class Kernel:
    """One operation's kernel and its probation.

    Attributes:
        name: for the warning.
        supports: whether it is meant for a device and number type at all; nothing is compiled for the answer.
        disagreement: runs both on random tensors of that device and type and says how far they are apart, relative to
            the PyTorch result; may raise anything. It draws from a generator of its own: a training's random streams
            must not depend on it. Gradients are on, autocast is off.
        bound: how far they may be apart, by number type.
        verdicts: what is known, by device and type.
        reasons: of those that are left out.
    """

    name: str
    supports: Callable[[torch.device, torch.dtype], bool]
    disagreement: Callable[[torch.device, torch.dtype], float]
    bound: Callable[[torch.dtype], float]
    verdicts: dict[tuple[torch.device, torch.dtype], bool] = field(default_factory=dict)
    reasons: dict[tuple[torch.device, torch.dtype], str] = field(default_factory=dict)

    def usable(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether to use it now."""
        if _choice == "torch" or not self.supports(device, dtype):
            return False
        key = device, dtype
        if key not in self.verdicts:
            self.verdicts[key] = self._try(device, dtype)
        return self.verdicts[key]

    def refusal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it is not used now; None: it is."""
        if self.usable(device, dtype):
            return None
        if _choice == "torch":
            return "kernels=torch"
        return self.reasons.get((device, dtype), f"it is not written for {device.type} and {dtype}")

    def _try(self, device: torch.device, dtype: torch.dtype) -> bool:
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
                found = self.disagreement(device, dtype)
        except Exception as error:  # compilers and drivers raise anything
            told = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            reason = f"it does not run: {type(error).__name__}{': ' * bool(told)}{told}"
        else:
            if found <= self.bound(dtype):
                return True
            reason = f"its results differ by {found:.1e}, {self.bound(dtype):.0e} is allowed"
        self.reasons[device, dtype] = reason
        warnings.warn(
            f"{self.name} is left out on {device} for {dtype}: {reason}; PyTorch's own operations go on in its place",
            stacklevel=3,
        )
        return False
