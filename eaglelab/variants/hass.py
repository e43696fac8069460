"""HASS: EAGLE-1's drafter, trained in the context that decoding gives it (HASS paper, sections 3.1 and 3.2).

| contract          | here                                                                     |
|-------------------|--------------------------------------------------------------------------|
| target state read | last hidden state after the final norm                                   |
| drafter input     | fc([e(x_{t+1}); f_t]), 2d -> d                                            |
| training context  | 3 passes: draft features spliced in, detached; own ancestors visible     |
| objective         | EAGLE-1's two terms + 1.0 top-K soft cross entropy, not renormalised     |
| token head        | the target's, frozen                                                     |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eaglelab.drafters import RolloutContext, ShippedContext
from eaglelab.objectives import NoiseLaw
from eaglelab.target import FrozenTarget
from eaglelab.variants.base import Pass
from eaglelab.variants.eagle import EagleModule
from eaglelab.variants.optim import OptimConfig
from eaglelab.variants.view import View

Alignment = Literal["masked", "shipped"]


class HassModule(EagleModule):
    """HASS training.

    Pass ``s`` works on the chains of ``s`` draft steps: root ``r`` reads its own state of pass ``s - 1``, detached,
    at position ``r + s``, and sees the target's rows up to ``r`` and its own earlier states. The published code
    indexes the same graph by absolute position. Each pass is back-propagated on its own, so memory is that of one
    pass; keys of earlier states are computed again with the present weights, and gradients reach them.

    Args:
        target, optim: see :class:`DraftingModule`; noise and the two EAGLE weights: see :class:`EagleModule`.
        passes: alignment passes, 1 to 5; 1 is EAGLE-1's context.
        top_k: K of the top-K term.
        top_weight: its weight; 0 leaves EAGLE-1's objective.
        renormalise_top_k: ablation: another loss, see :func:`~eaglelab.objectives.distill`.
        pass_weights: weight of each pass; None: all 1.
        alignment: ``masked`` hides what decoding hides; ``shipped`` is the published arithmetic, an ablation
            (:class:`~eaglelab.drafters.ShippedContext`).
        eagle_share: first part of the training, 0 to 1, that is EAGLE-1's: one pass, no top-K term. Aligning a
            drafter that cannot predict one step yet is wasted work, so small budgets gain from it. Published is 0
            with a first stage of its own that leaves out the top-K term only (``experiment=hass_pinned``).
    """

    variant = "hass"

    def __init__(
        self,
        target: FrozenTarget,
        optim: OptimConfig,
        *,
        noise: NoiseLaw = "none",
        passes: int = 3,
        top_k: int = 10,
        top_weight: float = 1.0,
        renormalise_top_k: bool = False,
        pass_weights: Sequence[float] | None = None,
        alignment: Alignment = "masked",
        eagle_share: float = 0.0,
        **shared: Any,
    ) -> None:
        if not 1 <= passes <= 5:
            raise ValueError(f"variant.passes={passes}: HASS takes 1 to 5 alignment passes")
        weights = [1.0] * passes if pass_weights is None else [float(w) for w in pass_weights]
        if len(weights) != passes:
            raise ValueError(f"variant.pass_weights={weights} must have one weight for each of {passes} passes")
        if alignment not in get_args(Alignment):
            raise ValueError(f"variant.alignment={alignment!r} is not one of {', '.join(get_args(Alignment))}")
        if not 0 <= eagle_share < 1:
            raise ValueError(f"variant.eagle_share={eagle_share} must be in [0, 1)")
        if top_k < 1:
            raise ValueError(f"variant.top_k={top_k} must be at least 1; top_weight=0 switches the term off")
        self.eagle_share = eagle_share
        self.top_k = top_k
        self.top_weight = top_weight
        self.renormalise_top_k = renormalise_top_k
        self.pass_weights = weights
        self.alignment = alignment
        switches = {
            "passes": passes,
            "top_k": top_k,
            "top_weight": top_weight,
            "renormalise_top_k": renormalise_top_k,
            "pass_weights": weights,
            "alignment": alignment,
            "eagle_share": eagle_share,
        }
        super().__init__(target, optim, noise=noise, switches_of_subclass=switches, **shared)

    @property
    def is_eagle_yet(self) -> bool:
        """Whether the present step is still in the first, EAGLE-1 part."""
        return self.eagle_share > 0 and self.global_step < self.eagle_share * self.whole_steps

    @property
    def num_passes(self) -> int:
        return 1 if self.is_eagle_yet else len(self.pass_weights)

    def passes(self, view: View) -> Iterator[Pass]:
        weight = 0.0 if self.is_eagle_yet else self.top_weight
        term = {"top_weight": weight, "top_k": self.top_k, "renormalise": self.renormalise_top_k}
        states = [self.noisy(self.network.fuse(view.taps_BRF), view)]
        for step, pass_weight in enumerate(self.pass_weights[: self.num_passes]):
            predicted_BRd = self._forward(states, view)
            one = self.objective(predicted_BRd, view, step, **term)
            yield Pass(
                pass_weight * one.loss, {f"{name}/step{step}" if step else name: x for name, x in one.means.items()}
            )
            states.append(predicted_BRd.detach())

    def _forward(self, states: list[Tensor], view: View) -> Tensor:
        """Predict from the newest state of every root; the older ones give keys."""
        if self.alignment == "shipped":
            context: RolloutContext = ShippedContext(view.rows, view.tokens_BS.shape[1])
        else:
            context = RolloutContext(view.rows)
        for step, state_BRd in enumerate(states[:-1]):
            # recomputed in the backward pass: only keys and values are kept, so a pass stays as small as EAGLE-1's
            inputs = (state_BRd, view.embedding(step), view.position(step))
            keys = checkpoint(self.network.keys, *inputs, use_reentrant=False)
            (context.add_own if step else context.add_native)(*keys)
        last = len(states) - 1
        attend = context.own if last else context.native
        return self.network(states[-1], view.embedding(last), view.position(last), attend)
