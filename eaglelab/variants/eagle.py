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

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from eaglelab.drafters import DrafterConfig, FeatureDrafter, RolloutContext
from eaglelab.objectives import NoiseLaw, distill, feature_noise, smooth_l1
from eaglelab.target import FrozenTarget
from eaglelab.variants.base import DraftingModule, Pass
from eaglelab.variants.optim import OptimConfig
from eaglelab.variants.view import View


class EagleModule(DraftingModule):
    """EAGLE-1 training.

    Args:
        target, optim: see :class:`DraftingModule`, as are the remaining keywords.
        noise: law of the input noise.
        noise_scale: its half-width (standard deviation for ``gaussian``); 0.1 in the paper.
        regression_weight, distillation_weight: ``v_w`` and ``p_w``; 1.0 and 0.1 in the paper.
        smooth_l1_beta: where SmoothL1 turns linear.
        switches_of_subclass: further contract switches for the manifest.
    """

    variant = "eagle"

    def __init__(
        self,
        target: FrozenTarget,
        optim: OptimConfig,
        *,
        noise: NoiseLaw = "paper_uniform",
        noise_scale: float = 0.1,
        regression_weight: float = 1.0,
        distillation_weight: float = 0.1,
        smooth_l1_beta: float = 1.0,
        switches_of_subclass: dict[str, Any] | None = None,
        **shared: Any,
    ) -> None:
        self.noise: NoiseLaw = noise
        self.noise_scale = noise_scale
        self.regression_weight = regression_weight
        self.distillation_weight = distillation_weight
        self.smooth_l1_beta = smooth_l1_beta
        switches = {
            "noise": noise,
            "noise_scale": noise_scale,
            "regression_weight": regression_weight,
            "distillation_weight": distillation_weight,
            "smooth_l1_beta": smooth_l1_beta,
        }
        super().__init__(target, optim, switches=switches | (switches_of_subclass or {}), **shared)

    @classmethod
    def build_network(cls, config: DrafterConfig) -> FeatureDrafter:
        return FeatureDrafter(config)

    def passes(self, view: View) -> Iterator[Pass]:
        context = RolloutContext(view.rows)
        state_BRd = self.noisy(self.network.fuse(view.taps_BRF), view)
        yield self.objective(self.network(state_BRd, view.embedding(), view.position(), context.native), view)

    def noisy(self, state_BRd: Tensor, view: View) -> Tensor:
        """The input features plus this micro-batch's noise."""
        noise_BRd = feature_noise(
            state_BRd.shape,
            self.noise,
            scale=self.noise_scale,
            length_BR=view.sample_length(),
            generator=self.generator(),
            device=state_BRd.device,
        )
        return state_BRd if noise_BRd is None else state_BRd + noise_BRd.to(state_BRd.dtype)

    def objective(self, predicted_BRd: Tensor, view: View, step: int = 0, **top_k_term: Any) -> Pass:
        """EAGLE's two terms over the supervised rows of rollout step ``step``."""
        slots_M = view.rows.supervised_slots(step)
        predicted_Md = predicted_BRd.flatten(0, 1)[slots_M]
        teacher_Md = view.teacher(step).flatten(0, 1)[slots_M]
        regression = smooth_l1(predicted_Md, teacher_Md, beta=self.smooth_l1_beta)
        distilled = distill(
            predicted_Md, teacher_Md, view.target.lm_head, soft_weight=self.distillation_weight, **top_k_term
        )
        sums = {
            "regression": regression.detach(),
            "distillation": distilled.soft,
            "accuracy": distilled.hits_M.sum(),
            "recall@5": distilled.recall,
        }
        if top_k_term:
            sums["top_k"] = distilled.top
        loss_sum = self.regression_weight * regression + distilled.loss
        rows = max(slots_M.numel(), 1)
        return Pass(loss_sum / self.row_count(slots_M.numel()), {name: x / rows for name, x in sums.items()})
