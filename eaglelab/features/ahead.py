"""The target's pass over the next batch, beside the drafter's step on this one.

On a GPU the pass runs on a stream of its own. It pays where neither fills the device alone: small batches, small
drafters. It costs the features of a second batch in memory.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from eaglelab.data.batch import Batch
from eaglelab.features.source import Features, OnlineFeatures
from eaglelab.target import SequencePlan, Tap


class FeaturesAhead:
    """Features of an online source, started one batch early where a loader looks ahead (``Batch.following``).

    Args:
        source: runs the target.
    """

    has_last_feature = True

    def __init__(self, source: OnlineFeatures) -> None:
        self.source = source
        self._started: _Started | None = None
        self._stream: torch.cuda.Stream | None = None

    def plan(self, batch: Batch) -> tuple[SequencePlan, ...] | None:
        return None if self._has(batch) else self.source.plan(batch)

    def of(self, batch: Batch, taps: tuple[Tap, ...]) -> Features:
        features = self._take(batch) or self.source.of(batch, taps)
        if batch.following is not None and batch.following.supervised:
            self._start(batch.following, taps)
        return features

    def _has(self, batch: Batch) -> bool:
        return self._started is not None and batch.ticket is not None and self._started.ticket is batch.ticket

    def _take(self, batch: Batch) -> Features | None:
        if not self._has(batch):
            return None
        assert self._started is not None
        started, self._started = self._started, None
        if started.done is not None:
            here = torch.cuda.current_stream()
            here.wait_event(started.done)
            for tensor in started.tensors:  # made on another stream: not to be freed before this one has read it
                tensor.record_stream(here)
        return started.features

    def _start(self, batch: Batch, taps: tuple[Tap, ...]) -> None:
        device = self.source.target.device
        planned = dataclasses.replace(batch, sequences=self.source.plan(batch))
        with self._aside(device):
            features = self.source.of(planned.to(device, non_blocking=True), taps)
            done = None if self._stream is None else self._stream.record_event()
        self._started = _Started(batch.ticket, features, done)

    def _aside(self, device: torch.device) -> AbstractContextManager[object]:
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # behind the step before, beside this one
        return torch.cuda.stream(self._stream)


@dataclasses.dataclass
class _Started:
    ticket: object
    features: Features
    done: torch.cuda.Event | None

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.features.streams.values(), self.features.teacher_BSw]
