"""Times of work that is queued on a device, taken without waiting for it."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Marks along some work. On CUDA the marks are events, read only when asked for: no sync."""

    __slots__ = ("_device", "_marks")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float | torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    @property
    def passed(self) -> bool:
        """Whether the device has passed the last mark."""
        last = self._marks[-1]
        return last.query() if isinstance(last, torch.cuda.Event) else True

    def between(self, first: int, last: int) -> float:
        """Seconds from mark `first` to mark `last`; waits for the device if it is not there yet."""
        start, end = self._marks[first], self._marks[last]
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            end.synchronize()
            return start.elapsed_time(end) / 1000
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
