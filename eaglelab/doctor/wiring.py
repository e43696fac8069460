"""How a drafter's weights are connected to its target: everything that a checkpoint's tensors do not say.

Letters: B sequences, S tokens, R rows, F width of the concatenated taps, d hidden width.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eaglelab.data.batch import Batch
from eaglelab.drafters import DraftNetwork
from eaglelab.target import FINAL, FrozenTarget, Tap
from eaglelab.variants.view import View

Address = Tap | Literal["last_stream"]
"""A tap, or the residual stream behind the last layer, before the final norm."""
LAST_STREAM: Literal["last_stream"] = "last_stream"
Steps = Literal["advance", "stay", "ahead"]
"""Rotary position of draft step s: t + s, t, or t + s + 1 from the first draft step on."""
Rewire = Callable[[DraftNetwork], None]


@dataclasses.dataclass(frozen=True)
class Wiring:
    """One way to connect a drafter.

    Attributes:
        taps: streams that it reads, in order.
        feature_shift: the row of token ``t`` reads the streams of token ``t + feature_shift``.
        token_shift: and the embedding of ``x_{t + 1 + token_shift}``.
        embedding_scale: embeddings are multiplied by it, on top of what the target does.
        steps: rotary positions of draft steps.
        rewire: changes a copy of the network in place.
    """

    taps: tuple[Address, ...]
    feature_shift: int = 0
    token_shift: int = 0
    embedding_scale: float = 1.0
    steps: Steps = "advance"
    rewire: Rewire | None = None

    def network(self, network: DraftNetwork) -> DraftNetwork:
        """``network``, or a changed copy."""
        if self.rewire is None:
            return network
        changed = copy.deepcopy(network)
        self.rewire(changed)
        return changed

    def view(self, batch: Batch, target: FrozenTarget, streams: Mapping[Address, Tensor]) -> View:
        """What a drafter sees of one conversation under this wiring."""
        tapped_BSF = torch.cat([_shifted(streams[tap], self.feature_shift) for tap in self.taps], dim=-1)
        rows = batch.rows
        return WiredView(rows, batch.tokens_BS, rows.gather(tapped_BSF), streams[FINAL], target, wiring=self)


@dataclasses.dataclass
class WiredView(View):
    """A view with other addresses for tokens and positions."""

    wiring: Wiring = dataclasses.field(kw_only=True)

    def embedding(self, step: int = 0) -> Tensor:
        ids_BR = self.rows.gather(self.tokens_BS, 1 + step + self.wiring.token_shift)
        return self.target.embed(ids_BR) * self.wiring.embedding_scale

    def position(self, step: int = 0) -> Tensor:
        if self.wiring.steps == "stay":
            return super().position(0)
        return super().position(step + (self.wiring.steps == "ahead" and step > 0))


def _shifted(x_BSd: Tensor, offset: int) -> Tensor:
    """Token ``t`` gets what token ``t + offset`` has; the ends repeat."""
    place_S = (torch.arange(x_BSd.shape[1], device=x_BSd.device) + offset).clamp(0, x_BSd.shape[1] - 1)
    return x_BSd[:, place_S]


@torch.no_grad()
def read_streams(target: FrozenTarget, batch: Batch, addresses: set[Address]) -> dict[Address, Tensor]:
    """The streams [B, S, d] at ``addresses`` and the last feature, from one forward pass."""
    taps = tuple(address for address in addresses | {FINAL} if address != LAST_STREAM)
    with _last_stream(target) as caught:
        found: dict[Address, Tensor] = {}
        for tap, stream_BSd in target.features(batch.tokens_BS, taps, valid_BS=batch.valid_BS).items():
            found[tap] = stream_BSd
    found[LAST_STREAM] = caught[-1]
    return found


@contextmanager
def _last_stream(target: FrozenTarget) -> Iterator[list[Tensor]]:
    caught: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        caught.append(output if isinstance(output, Tensor) else output[0])

    handle = target.last_layer.register_forward_hook(hook)
    try:
        yield caught
    finally:
        handle.remove()
