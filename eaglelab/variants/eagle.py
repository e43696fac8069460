"""EAGLE-1: regress the next feature, one pass, with noise on the input (EAGLE paper, section 4; ``cnets1.py``).

| contract          | here                                                              |
|-------------------|-------------------------------------------------------------------|
| target state read | last hidden state after the final norm                            |
| drafter input     | fc([e(x_{t+1}); f_t]), 2d -> d                                     |
| training context  | target features + noise                                           |
| objective         | 1.0 SmoothL1 + 0.1 soft cross entropy                              |
| token head        | the target's, frozen                                              |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from eaglelab.data.needed import NeededRows
from eaglelab.data.rows import Rows
from eaglelab.drafters import DrafterConfig, FeatureDrafter, RolloutContext
from eaglelab.objectives import NoiseLaw, distill, feature_noise, smooth_l1
from eaglelab.objectives.noise import check_noise
from eaglelab.variants.base import DraftingModule, Pass
from eaglelab.variants.contract import Contract, require_not_negative, require_one_of
from eaglelab.variants.measures import Measure
from eaglelab.variants.view import View

Labels = Literal["soft", "hard"]


@dataclasses.dataclass(kw_only=True)
class EagleContract(Contract):
    """EAGLE-1's switches.

    Attributes:
        noise: law of the input noise.
        noise_scale: its half-width (standard deviation for ``gaussian``); 0.1 in the paper.
        regression_weight, distillation_weight: ``v_w`` and ``p_w``; 1.0 and 0.1 in the paper.
        smooth_l1_beta: where SmoothL1 turns linear.
        labels: what is distilled: ``soft``, the target's distribution, as published, or ``hard``, the data's token
            ``x_{t+2}``, an ablation. Rows without that token, the last of each segment, are then no rows at all.
    """

    noise: NoiseLaw = "paper_uniform"
    noise_scale: float = 0.1
    regression_weight: float = 1.0
    distillation_weight: float = 0.1
    smooth_l1_beta: float = 1.0
    labels: Labels = "soft"

    def __post_init__(self) -> None:
        require_one_of("labels", self.labels, Labels)
        check_noise(self.noise, self.noise_scale)
        require_not_negative(self, "regression_weight", "distillation_weight", "smooth_l1_beta")


class EagleModule(DraftingModule):
    """EAGLE-1 training; keywords: those of :class:`DraftingModule` and the fields of :class:`EagleContract`."""

    variant = "eagle"
    contract_type = EagleContract
    contract: EagleContract

    @classmethod
    def build_network(cls, config: DrafterConfig) -> FeatureDrafter:
        return FeatureDrafter(config)

    def passes(self, view: View) -> Iterator[Pass]:
        needed = self.needed(view.rows)
        context = RolloutContext(view.rows, needed.slot_BU, needed.spans)
        state_BRd = self.noisy(self.network.fuse(view.taps_BRF), view)
        predicted_BUd = self.network(state_BRd, view.embedding(), view.position(), context.native, needed.slot_BU)
        yield self.objective(predicted_BUd, view, needed)

    def noisy(self, state_BRd: Tensor, view: View) -> Tensor:
        """The input features plus this micro-batch's noise."""
        noise_BRd = feature_noise(
            state_BRd.shape,
            self.contract.noise,
            scale=self.contract.noise_scale,
            length_BR=view.sample_length(),
            generator=self.generator(),
            device=state_BRd.device,
        )
        return state_BRd if noise_BRd is None else state_BRd + noise_BRd.to(state_BRd.dtype)

    def supervised(self, rows: Rows, step: int = 0) -> Tensor:
        slots_M = super().supervised(rows, step)
        return slots_M[rows.reaches(2 + step).flatten()[slots_M]] if self.contract.labels == "hard" else slots_M

    def objective(
        self, predicted_BUd: Tensor, view: View, needed: NeededRows, step: int = 0, **top_k_term: Any
    ) -> Pass:
        """EAGLE's two terms over the supervised rows of rollout step ``step``."""
        view, slots_M = view.of_needed(needed), needed.loss[step]
        predicted_Md = predicted_BUd.flatten(0, 1)[slots_M]
        teacher_Md = view.teacher(step).flatten(0, 1)[slots_M]
        regression = smooth_l1(predicted_Md, teacher_Md, beta=self.contract.smooth_l1_beta)
        distilled = distill(
            predicted_Md,
            teacher_Md,
            view.target.lm_head,
            soft_weight=self.contract.distillation_weight,
            label_M=view.label(step).flatten()[slots_M] if self.contract.labels == "hard" else None,
            **top_k_term,
        )
        rows = slots_M.numel()
        measures: dict[str, Measure] = {
            "regression": (regression.detach(), rows),
            "distillation": (distilled.soft, rows),
            "accuracy": (distilled.hits_M.sum(), rows),
            "recall@5": (distilled.recall, rows),
        }
        if top_k_term:
            measures["top_k"] = (distilled.top, rows)
        loss_sum = self.contract.regression_weight * regression + distilled.loss
        return Pass(loss_sum / self.row_count(rows), [(loss_sum.detach(), rows)], measures)
