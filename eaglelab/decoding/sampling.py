"""How a request chooses its tokens: the processed distribution, and the draw from it.

A draw at output place k uses the k-th number of the request's own stream. So what is drawn at a place depends on the
request's seed and on the tokens before it, not on the tree, the batch or the rounds: with a deterministic tree a
sampled answer is, token for token, that of plain decoding.

Letters: B batch, R flat rows, V vocabulary, L levels of a tree, the root's included, n rows of one level, S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eaglelab.decoding.residual import draw_from
from eaglelab.decoding.tree import FlatTree
from eaglelab.ops import largest, on_device

Process = Callable[..., Tensor]  # (token ids [n, S], scores [n, V]) -> scores [n, V]


@dataclass(frozen=True)
class Sampling:
    """Settings of one request, with the meaning and the order that `transformers` gives them.

    temperature: 0 takes the most probable token.
    top_k, top_p, min_p: truncation; used at temperature > 0 only. None, 1 and 0 switch them off.
    repetition_penalty: 1 is none.
    processors: further logits processors, run before the truncation, at temperature 0 too. They must be functions
        of their arguments: verification calls them for rows of several branches.
    seed: of the request's stream.

    Raises:
        ValueError: a setting out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    processors: tuple[LogitsProcessor, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: choose 0 (greedy) or a positive number")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k}: choose a whole number >= 1, or null to keep all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be between 0 and 1; 0 keeps all tokens")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be a positive number; 1 is none")
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"seed={self.seed!r} must be a whole number >= 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def with_seed(self, seed: int) -> Sampling:
        """The same settings with another stream."""
        return replace(self, seed=seed)

    @cached_property
    def in_context(self) -> tuple[Process, ...]:
        """Processors that look at the tokens so far."""
        penalty = self.repetition_penalty
        own = () if penalty == 1 else (RepetitionPenaltyLogitsProcessor(penalty),)
        return (*own, *self.processors)

    @cached_property
    def warpers(self) -> tuple[Process, ...]:
        """Processors that look at the scores alone."""
        if self.greedy:
            return ()
        chosen: list[Process] = []
        if self.temperature != 1:
            chosen.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            chosen.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            chosen.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            chosen.append(MinPLogitsWarper(self.min_p))
        return tuple(chosen)

    @property
    def truncation(self) -> tuple[float, int | None, float, float]:
        """Requests of equal truncation are warped in one call."""
        return self.temperature, self.top_k, self.top_p, self.min_p


@dataclass
class Stream:
    """A request's uniform numbers by output place; looking at one twice gives the same number."""

    seed: int
    _numbers: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False)

    def at(self, first: int, count: int) -> np.ndarray:
        """float64 [count], the numbers of the places from ``first`` on."""
        if first + count > len(self._numbers):
            self._numbers = np.random.default_rng(self.seed).random(2 * (first + count) + 64)
        return self._numbers[first : first + count]

    def round(self, place: int, device: torch.device) -> torch.Generator:
        """The generator of the round that starts at output ``place``; what a sampled tree is drawn with."""
        mixed = np.random.SeedSequence([self.seed, place]).generate_state(2, np.uint32)
        return torch.Generator(device).manual_seed(int(mixed[0]) | int(mixed[1]) << 32)


def numbers(
    settings: Sequence[Sampling], streams: Sequence[Stream], places: Sequence[int], L: int, device: torch.device
) -> Tensor | None:
    """The uniform numbers of the L output places from ``places[b]`` on, float64 [B, L]; None when all are greedy."""
    if all(one.greedy for one in settings):
        return None
    rows = [stream.at(place, L) for stream, place in zip(streams, places, strict=True)]
    return torch.from_numpy(np.stack(rows)).to(device, non_blocking=True)


def noise(generators: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """Uniform float32 in [0, 1), [B, *shape], each sequence from its own generator."""
    return torch.stack([torch.rand(shape, generator=one, device=one.device) for one in generators])


def processed(
    logits_BRV: Tensor, flat: FlatTree, settings: Sequence[Sampling], prefixes: Sequence[Sequence[int]]
) -> Tensor:
    """Every row's scores after its request's processors, [B, R, V].

    Args:
        logits_BRV: the target's, row by row.
        settings: one per sequence.
        prefixes: each sequence's tokens, the root's (the frontier token) left out.

    Returns:
        float32, or the logits themselves where nothing is to be done to any row.
    """
    if all(one.greedy and not one.in_context for one in settings):
        return logits_BRV
    scores_BRV = logits_BRV.float()
    if any(one.in_context for one in settings):
        scores_BRV = torch.stack(
            [
                _look_back(scores_RV, flat, b, prefixes[b], settings[b].in_context)
                if settings[b].in_context
                else scores_RV
                for b, scores_RV in enumerate(scores_BRV)
            ]
        )
    return _warp(scores_BRV, settings)


def warp_drafts(log_p_BWV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Draft log-probabilities of each sequence, warped by its own settings; greedy ones stay at temperature 1."""
    return _warp(log_p_BWV, settings)


def choose(scores_BRV: Tensor, flat: FlatTree, settings: Sequence[Sampling], uniform_BL: Tensor | None) -> Tensor:
    """The token that the target chooses after each row, int64 [B, R]; -1 where the scores have a NaN.

    Equal scores resolve to the lowest id, as `torch.argmax` does.

    Args:
        scores_BRV: from `processed`.
        uniform_BL: float64, one number per sequence and level; rows of one level share it, since at most one of them
            is on the accepted path. None when every request is greedy.
    """
    if uniform_BL is None:
        return _most_probable(scores_BRV)
    B = scores_BRV.shape[0]
    uniform_BR = uniform_BL.gather(1, flat.topology.depth_BR.expand(B, -1))
    drawn_BR = draw_from(scores_BRV.softmax(dim=-1), uniform_BR)
    greedy = [one.greedy for one in settings]
    if not any(greedy):
        return drawn_BR
    return torch.where(_column(greedy, scores_BRV.device), _most_probable(scores_BRV), drawn_BR)


def distribution(scores_BRV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Scores -> the probabilities that they stand for, float32 [B, R, V]; one-hot for greedy requests."""
    p_BRV = scores_BRV.float().softmax(dim=-1)
    greedy = [one.greedy for one in settings]
    if not any(greedy):
        return p_BRV
    sure_BRV = torch.zeros_like(p_BRV).scatter_(-1, scores_BRV.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(_column(greedy, p_BRV.device)[..., None], sure_BRV, p_BRV)


def _most_probable(scores_BRV: Tensor) -> Tensor:
    best_BR, ids_BR = largest(scores_BRV)
    return ids_BR.masked_fill_(best_BR.isnan(), -1)


def _column(flags: Sequence[bool], device: torch.device) -> Tensor:
    return on_device(flags, device)[:, None]


def _warp(scores_BRV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    groups: dict[tuple, list[int]] = {}
    for b, one in enumerate(settings):
        groups.setdefault(one.truncation, []).append(b)
    if len(groups) == 1:
        return _run(settings[0].warpers, scores_BRV)
    warped_BRV = scores_BRV.clone()
    for members in groups.values():
        warped_BRV[members] = _run(settings[members[0]].warpers, scores_BRV[members])
    return warped_BRV


def _run(warpers: Sequence[Process], scores_BRV: Tensor) -> Tensor:
    scores_nV = scores_BRV.flatten(0, 1)
    unread_n0 = torch.empty(scores_nV.shape[0], 0, dtype=torch.int64, device=scores_nV.device)
    for warper in warpers:
        scores_nV = warper(unread_n0, scores_nV)
    return scores_nV.view(scores_BRV.shape)


def _look_back(
    scores_RV: Tensor, flat: FlatTree, b: int, prefix: Sequence[int], processors: Sequence[Process]
) -> Tensor:
    """Run processors level by level: rows of one level have equally long texts."""
    tree = flat.topology
    device = scores_RV.device
    prefix_S = on_device(list(prefix), device, torch.int64)
    depth_R = tree.depth_BR[b if tree.depth_BR.shape[0] > 1 else 0]
    path_RL = tree.path_BRL[b if tree.path_BRL.shape[0] > 1 else 0]
    tokens_RL = flat.tokens_BR[b].clamp(min=0)[path_RL]
    result_RV = scores_RV.clone()
    for level in range(path_RL.shape[1]):
        # of a tree that branches the host waits for the rows: processors take texts of one length
        on_level = torch.arange(level, level + 1, device=device) if tree.chain else (depth_R == level).nonzero()
        rows_n = on_level.flatten()
        if not rows_n.numel():
            continue
        text_nS = torch.cat([prefix_S.expand(len(rows_n), -1), tokens_RL[rows_n, : level + 1]], dim=1)
        scores_nV = scores_RV[rows_n]
        for processor in processors:
            scores_nV = processor(text_nS, scores_nV)
        result_RV[rows_n] = scores_nV
    return result_RV
