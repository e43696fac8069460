"""An accelerator that this machine does not have: tensors with its name, whose values lie in ordinary memory.

Operations run on the CPU and give its results, but as on a real accelerator every operand must be on the device.
Numbers and small tensors that a device reads from the host all the same (zero dimensions, indices) are allowed. Every
wait of the host for the device is written down.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
NAME = "pretended"

WAITING = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
}
MOVING = {aten._to_copy.default, aten.copy_.default}
HOST_INDICES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
"""What CUDA too lets a device tensor be indexed with: integers in host memory."""


class WrongDeviceError(RuntimeError):
    """Tensors of host and device in one operation."""


class Pretended(torch.Tensor):
    """A tensor on the pretended device; ``host`` holds its values."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, requires_grad: bool = False) -> Pretended:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=f"{NAME}:0",
            requires_grad=requires_grad,
        )

    def __init__(self, host: torch.Tensor, requires_grad: bool = False) -> None:
        self.host = host

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    def tolist(self) -> Any:
        _note("tolist")
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a device tensor to numpy; use Tensor.cpu() to copy it to host memory first")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.host!r})"


waits: list[str] = []


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation."""
    if (
        inner := function.decompose(*args, **kwargs)
    ) is not NotImplemented:  # inference mode hands composites over whole
        return inner
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    mixed = [x for x in tensors if not isinstance(x, Pretended) and x.dim() > 0]
    here = any(isinstance(x, Pretended) for x in tensors)
    if here and mixed and function not in MOVING and not _only_indices(function, args):
        raise WrongDeviceError(
            f"{function}: {[('device' if isinstance(x, Pretended) else 'host', tuple(x.shape)) for x in tensors]}"
        )
    to = kwargs.get("device")
    to_host = to is not None and torch.device(to).type == "cpu"
    if (function in WAITING and here) or _bool_index(function, args):
        _note(function)
    if _crosses(function, args, to) and not _non_blocking(function, args, kwargs):
        _note(function)
    if to is not None:
        kwargs = kwargs | {"device": "cpu"}
    if function is aten.histc.default:  # counts integers on accelerators only
        args = (args[0].float(), *args[1:])
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    host_of = lambda x: x.host if isinstance(x, Pretended) else x  # noqa: E731
    found = function(*tree_map(host_of, args), **tree_map(host_of, kwargs))
    assert all(x.shape == x.host.shape for x in tensors if isinstance(x, Pretended)), f"{function} resized a tensor"
    if to_host or (function is aten.copy_.default and not isinstance(args[0], Pretended)):
        return args[0] if function is aten.copy_.default else found
    wrapped = tree_map(lambda x: Pretended(x) if isinstance(x, torch.Tensor) else x, found)
    return return_and_correct_aliasing(function, args, kwargs, wrapped) if here else wrapped


def _crosses(function: Any, args: Any, to: Any) -> bool:
    """Whether values go between host and device, in either direction."""
    if function is aten._to_copy.default:
        return to is not None and (torch.device(to).type == NAME) != isinstance(args[0], Pretended)
    if function is aten.copy_.default:
        return isinstance(args[0], Pretended) != isinstance(args[1], Pretended)
    return False


def _non_blocking(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if function is aten.copy_.default and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking", False))


def _only_indices(function: Any, args: Any) -> bool:
    if function not in HOST_INDICES:
        return False
    others = [x for x in tree_flatten((args[0], args[2:]))[0] if isinstance(x, torch.Tensor)]
    return all(isinstance(x, Pretended) or x.dim() == 0 for x in others)


def _bool_index(function: Any, args: Any) -> bool:
    return function in HOST_INDICES and any(x is not None and x.dtype == torch.bool for x in args[1])


def _note(function: Any) -> None:
    """With the innermost place in the product, or the library's."""
    frames = [f for f in traceback.extract_stack() if f.filename != __file__]
    own = [f for f in frames if "/eaglelab/" in f.filename] or frames
    waits.append(f"{function} in {'/'.join(own[-1].filename.split('/')[-2:])}:{own[-1].lineno}")


class _Module(_DummyBackendModule):
    """``torch.pretended``."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@contextmanager
def counting() -> Iterator[list[str]]:
    """The waits from here on, each with its place."""
    waits.clear()
    yield waits


def _on_host(name: str) -> Any:
    packet, _, overload = name.partition(".")
    function = getattr(getattr(aten, packet), overload or "default")
    return lambda *args, device=None, pin_memory=None, **kwargs: Pretended(function(*args, **kwargs, device="cpu"))


def start() -> torch.device:
    """Register the device; a process can do so once."""
    try:
        torch.device(NAME)
    except RuntimeError:
        _setup_privateuseone_for_python_backend(NAME, _Module())
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda function, *args, **kwargs: run(function, args, kwargs), "PrivateUse1")
        own = torch.library.Library("aten", "IMPL")
        for name in ("arange.start", "arange.start_step", "eye", "eye.m"):  # or they would resize an empty tensor
            own.impl(name, _on_host(name), "PrivateUse1")
        start.libraries = library, own  # type: ignore[attr-defined]
    return torch.device(NAME, 0)


def accelerator() -> Any:
    """Lightning's view of the device."""
    from lightning.pytorch.accelerators import CPUAccelerator

    class PretendedAccelerator(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            assert device.type == NAME

    return PretendedAccelerator()


FACTORIES = {
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.zeros,
}


class Constructors(TorchFunctionMode):
    """Tensors made on the device from nothing: some functions reach the dispatcher in parts, some not at all.

    The host does not wait for them, but for values of its own: ``torch.tensor`` is a copy.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and _named(kwargs.get("device")):
            where = kwargs.pop("device")
            return function(*args, **kwargs).to(where)
        if function in FACTORIES and _named(kwargs.get("device")):
            return Pretended(function(*args, **kwargs | {"device": "cpu"}))
        return function(*args, **kwargs)


def _named(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME
