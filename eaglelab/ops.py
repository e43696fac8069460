"""What a decoding round and a loss do so often that a CPU notices how it is done."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
BLOCK = 128
"""Scores whose maximum is looked for together."""
FEW = 2**16
"""Up to so many scores one operation is faster than five."""


def no_grad(function: Callable[P, R]) -> Callable[P, R]:
    """As ``torch.no_grad`` around a function, at no cost where gradients are off already."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def on_device(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.tensor(values)`` on a device. Made there directly, the host would wait for all work in its queue."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """``scores.max(-1)``: the largest score of [..., V] and its place, the first one of equals; NaN where there is one.

    On a CPU a maximum without its place takes a tenth of the time of one with it, so the place is looked for among
    the maxima of blocks, and then in the first block that has it.
    """
    V = scores.shape[-1]
    if scores.device.type != "cpu" or V % BLOCK or scores.numel() <= FEW:
        best, place = scores.max(-1)
        return best, place
    blocks = scores.unflatten(-1, (-1, BLOCK))
    maxima = blocks.amax(-1)
    block = maxima.argmax(-1, keepdim=True)
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, BLOCK)).squeeze(-2).argmax(-1, keepdim=True)
    return maxima.gather(-1, block).squeeze(-1), (block * BLOCK + inside).squeeze(-1)
