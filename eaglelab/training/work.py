"""What a piece of work multiplies and moves, counted from the operations that it really runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Work(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        flops: of matrix products and attention, a multiplication and an addition each, as
            ``torch.utils.flop_counter`` counts them.
        bytes: of the tensors that every operation reads and writes; views move nothing. What an operation reads twice,
            or finds in a cache, counts once, so it is a measure of traffic and not the traffic of a memory bus.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet == _flash:
            self.flops += sdpa_flop_count(*(x.shape for x in args[:3]))
        elif packet == _flash_backward:
            self.flops += sdpa_backward_flop_count(*(x.shape for x in args[:4]))
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        if not func.is_view:
            self.bytes += _bytes((args, kwargs)) + _bytes(out)
        return out


def _bytes(tree: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tree) if isinstance(x, Tensor))


MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns, by kind of device: large enough that a launch is no part of the time."""
COPIED_MIB = {"cpu": 64, "cuda": 1024}
"""Of a copy: no cache holds them."""


def matmul_flops(size: int | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> float:
    """Operations per second of a square matrix product; ``size`` None: :data:`MATMUL_SIZE`."""
    size = MATMUL_SIZE[torch.device(device).type] if size is None else size
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: a @ b, device)


def copy_bytes(mebibytes: int | None = None, device: str = "cpu") -> float:
    """Bytes per second that a copy reads and writes; ``mebibytes`` None: :data:`COPIED_MIB`."""
    mebibytes = COPIED_MIB[torch.device(device).type] if mebibytes is None else mebibytes
    source = torch.ones(mebibytes * 2**18, device=device)
    goal = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: goal.copy_(source), device)


def synchronize(device: torch.device | str) -> None:
    """Wait until a CUDA device has done what it was given."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


CALLS = {"cpu": 1, "cuda": 20}
"""Between two looks at the clock, by kind of device; a GPU is waited for once."""


def seconds_per_call(call: Callable[[], object], device: torch.device) -> float:
    """Of an operation that is called again and again."""
    calls = CALLS[device.type]
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / calls


def _fastest(work: Callable[[], object], device: str, repeats: int = 3) -> float:
    def seconds() -> Iterable[float]:
        for _ in range(repeats + 1):
            synchronize(device)
            began = time.perf_counter()
            work()
            synchronize(device)
            yield time.perf_counter() - began

    return min(seconds())
