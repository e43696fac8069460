"""Optimizer, learning-rate law and clipping of a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from eaglelab.variants.muon import MuonAdamW


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with a warm-up and a decay law; steps are optimizer steps.

    Attributes:
        lr: peak learning rate.
        name: ``adamw``, as in every published recipe, or ``muon`` (:class:`~eaglelab.variants.muon.MuonAdamW`).
        betas, weight_decay: AdamW's.
        warmup_steps: linear ramp from 0; a number below 1 is a share of ``total_steps``.
        total_steps: where the decay ends; None: at the end of training.
        schedule: after warm-up: ``linear`` or ``cosine`` down to ``final_lr_ratio * lr``, or ``constant``.
        clip_value: clip every gradient entry to [-c, c]; None: off.
        clip_norm: scale the whole gradient to norm <= c; None: off. The published recipes use one or the other.
        accumulate: micro-batches per optimizer step.
    """

    lr: float
    name: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: float = 0
    total_steps: int | None = None
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    final_lr_ratio: float = 0.0
    clip_value: float | None = None
    clip_norm: float | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        if self.clip_value is not None and self.clip_norm is not None:
            raise ValueError("optim: set clip_value or clip_norm, not both")
        if self.name not in ("adamw", "muon"):
            raise ValueError(f"optim.name={self.name!r} is not one of adamw, muon")
        if self.schedule not in ("linear", "cosine", "constant"):
            raise ValueError(f"optim.schedule={self.schedule!r} is not one of linear, cosine, constant")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)} must be two numbers in [0, 1)")
        if not (self.accumulate >= 1 and 0 < self.lr < math.inf):
            raise ValueError(f"optim: lr={self.lr} and accumulate={self.accumulate} must be positive")
        for name in ("weight_decay", "warmup_steps", "final_lr_ratio"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optim.{name}={getattr(self, name)} must not be negative; 0 is none")
        for name in ("total_steps", "clip_value", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"optim.{name}={value} must be positive; null leaves it out")

    def lr_scale(self, step: int, whole: int) -> float:
        """Multiplier of ``lr`` for optimizer step ``step``, counted from 0, of a training of ``whole`` steps."""
        total = self.total_steps or whole
        warmup = int(self.warmup_steps * total) if self.warmup_steps < 1 else int(self.warmup_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        fall = 0.5 * (1 + math.cos(math.pi * progress)) if self.schedule == "cosine" else 1 - progress
        return self.final_lr_ratio + (1 - self.final_lr_ratio) * fall

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], whole: int
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """The optimizer over the trainable ``parameters`` and its scheduler, stepped once per optimizer step.

        Args:
            parameters: named, of the drafter.
            whole: optimizer steps of the training.
        """
        trainable = [(name, p) for name, p in parameters if p.requires_grad]
        beta1, beta2 = self.betas
        settings: dict[str, Any] = {"lr": self.lr, "betas": (beta1, beta2), "weight_decay": self.weight_decay}
        optimizer: torch.optim.Optimizer
        if self.name == "muon":
            optimizer = MuonAdamW(trainable, **settings)
        else:
            optimizer = torch.optim.AdamW([p for _, p in trainable], fused=True, **settings)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.lr_scale(step, whole))
