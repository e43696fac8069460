"""A recorder for CPUs that is as strict as a CUDA graph: it repeats tensor operations, and nothing that Python did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx


def tensors_of(found: Any) -> list[Tensor]:
    """Every tensor in tuples, lists, dicts and dataclasses, in order, each once."""
    kept: dict[int, Tensor] = {}

    def visit(x: Any) -> None:
        if isinstance(x, Tensor):
            kept.setdefault(id(x), x)
        elif dataclasses.is_dataclass(x):
            visit([getattr(x, field.name) for field in dataclasses.fields(x)])
        elif isinstance(x, dict):
            visit(list(x.values()))
        elif isinstance(x, list | tuple):
            for one in x:
                visit(one)

    visit(found)
    return list(kept.values())


def traced(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """As `eaglelab.kernels.recording.cuda_graph`: runs the function once and lists its tensor operations.

    Raises:
        RuntimeError: it asks for a tensor's value.
    """
    held: list[Any] = []

    def listed() -> list[Tensor]:
        held.append(function())
        return tensors_of(held[-1])

    function()  # what is made at a first use
    graph = make_fx(listed)()
    results = tensors_of(held[-1])

    def replay() -> None:
        for mine, new in zip(results, graph(), strict=True):
            mine.copy_(new)

    return replay, held[-1]
