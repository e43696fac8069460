"""Muon for the matrices of a drafter, AdamW for everything else, behind one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """The library's Muon on weight matrices and AdamW on norms, biases and an own token head.

    Learning rates of the matrices are scaled by the library so that both take steps of alike size. One learning-rate
    law drives both, one state holds both, and one ``step`` counts once.

    Args:
        named: (name, parameter) of what is trained; ``lm_head`` goes to AdamW, as embeddings and heads usually do.
        lr, betas, weight_decay: AdamW's; lr and weight decay are Muon's too.
        momentum: Muon's.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named:
            (matrices if parameter.ndim == 2 and "lm_head" not in name else others).append(parameter)
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=lr, betas=betas, weight_decay=weight_decay),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups = [group]  # the very dict that a scheduler changes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for part in self._parts:
            part.step()
            self.state.update(part.state)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups = [group]
            part.state.clear()
            part.state.update({p: self.state[p] for p in group["params"] if p in self.state})
