"""Functions of tensors that are recorded at their first call and replayed from then on: CUDA graphs.

Of a round at batch 1 most is launching: hundreds of small kernels, each of which the host hands over for itself. A
recording hands them over at once. It repeats what the device did in the recorded call; whatever Python computed then is
part of it. So all that changes from call to call must come in as a tensor, and the function must not ask the device.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""A function without arguments -> what repeats it, and the object that holds its results, which every repetition
writes over."""


def cuda_graph(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record what ``function`` launches on the present CUDA device.

    Raises:
        RuntimeError: it asks the device, or does something else that a graph cannot hold.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):  # libraries, workspaces, the allocator's blocks
            function()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    here = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            found = function()
    except BaseException:
        torch.cuda.set_stream(here)  # where a recording fails, torch leaves the one that it recorded on
        raise
    return graph.replay, found


class Recordings:
    """Recorded calls, by key and by the shapes of their inputs.

    Args:
        record: makes a recording.
        most: recordings that are kept; beyond it the one that was used longest ago is dropped, with its memory.
    """

    def __init__(self, record: Recorder = cuda_graph, most: int = 16) -> None:
        self._record = record
        self._most = most
        self._kept: OrderedDict[Hashable, _Recording | None] = OrderedDict()

    def __len__(self) -> int:
        """Recordings that are there."""
        return sum(one is not None for one in self._kept.values())

    def clear(self) -> None:
        """Drop all recordings, and with them the buffers that they read and write."""
        self._kept.clear()

    def call(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor | None) -> Any:
        """``function(*inputs)``, recorded at the first call with this key and these shapes.

        A function that cannot be recorded is called as it is, with a warning at the first time.

        Args:
            key: what else the function depends on, by identity where it holds buffers.

        Returns:
            What the recorded call returned, with the values of this call; the next call of the same recording writes
            over them.
        """
        whole_key = key, *(None if x is None else (x.shape, x.dtype) for x in inputs)
        if whole_key not in self._kept:
            self._kept[whole_key] = self._recorded(function, inputs)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(whole_key)
        recording = self._kept[whole_key]
        return function(*inputs) if recording is None else recording(inputs)

    def _recorded(self, function: Callable[..., Any], inputs: tuple[Tensor | None, ...]) -> _Recording | None:
        own = tuple(None if x is None else x.clone(memory_format=torch.contiguous_format) for x in inputs)
        try:
            with torch.cuda.device_of(next(x for x in own if x is not None)):  # streams are of the present device
                replay, found = self._record(lambda: function(*own))
        except Exception as error:  # the library's, the driver's, the function's
            warnings.warn(
                f"a round goes on without a recording, launch by launch: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}",
                stacklevel=3,
            )
            return None
        return _Recording(function, own, replay, found)


class _Recording:
    """Holds the function, and with it the buffers that the recording reads and writes."""

    def __init__(
        self, function: Callable[..., Any], own: tuple[Tensor | None, ...], replay: Callable[[], None], found: Any
    ) -> None:
        self._function, self._own, self._replay, self._found = function, own, replay, found

    def __call__(self, inputs: tuple[Tensor | None, ...]) -> Any:
        for mine, given in zip(self._own, inputs, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        self._replay()
        return self._found
