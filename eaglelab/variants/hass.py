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

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eaglelab.drafters import RolloutContext, ShippedContext
from eaglelab.objectives import NoiseLaw
from eaglelab.variants.base import Pass
from eaglelab.variants.contract import require_one_of
from eaglelab.variants.eagle import EagleContract, EagleModule
from eaglelab.variants.view import View

Alignment = Literal["masked", "shipped"]


@dataclasses.dataclass(kw_only=True)
class HassContract(EagleContract):
    """HASS's switches, beside EAGLE-1's.

    Attributes:
        passes: alignment passes, 1 to 5; 1 is EAGLE-1's context.
        top_k: K of the top-K term.
        top_weight: its weight; 0 leaves EAGLE-1's objective. The term reads the target's distribution, whatever
            ``labels`` says.
        renormalise_top_k: ablation: another loss, see :func:`~eaglelab.objectives.distill`.
        pass_weights: weight of each pass; None: all 1.
        alignment: ``masked`` hides what decoding hides; ``shipped`` is the published arithmetic, an ablation
            (:class:`~eaglelab.drafters.ShippedContext`).
        detach: spliced states carry no gradient, as published, and each pass is back-propagated on its own. False:
            gradients run through all passes, which are then back-propagated together; memory is that of all of them.
        eagle_share: first part of the training, 0 to 1, that is EAGLE-1's: one pass, no top-K term. Aligning a
            drafter that cannot predict one step yet is wasted work, so small budgets gain from it. Published is 0
            with a first stage of its own that leaves out the top-K term only (``experiment=hass_pinned``).
    """

    noise: NoiseLaw = "none"
    passes: int = 3
    top_k: int = 10
    top_weight: float = 1.0
    renormalise_top_k: bool = False
    pass_weights: Sequence[float] | None = None
    alignment: Alignment = "masked"
    detach: bool = True
    eagle_share: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.passes <= 5:
            raise ValueError(f"variant.passes={self.passes}: HASS takes 1 to 5 alignment passes")
        self.pass_weights = [1.0] * self.passes if self.pass_weights is None else [float(w) for w in self.pass_weights]
        if len(self.pass_weights) != self.passes:
            raise ValueError(
                f"variant.pass_weights={self.pass_weights} must have one weight for each of {self.passes} passes"
            )
        require_one_of("alignment", self.alignment, Alignment)
        if not 0 <= self.eagle_share < 1:
            raise ValueError(f"variant.eagle_share={self.eagle_share} must be in [0, 1)")
        if self.top_k < 1:
            raise ValueError(f"variant.top_k={self.top_k} must be at least 1; top_weight=0 switches the term off")


class HassModule(EagleModule):
    """HASS training; keywords: those of :class:`DraftingModule` and the fields of :class:`HassContract`.

    Pass ``s`` works on the chains of ``s`` draft steps: root ``r`` reads its own state of pass ``s - 1``, detached,
    at position ``r + s``, and sees the target's rows up to ``r`` and its own earlier states. The published code
    indexes the same graph by absolute position. Each pass is back-propagated on its own, so memory is that of one
    pass; keys of earlier states are computed again with the present weights, and gradients reach them.
    """

    variant = "hass"
    contract_type = HassContract
    contract: HassContract

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.skips_rows = self.contract.alignment == "masked"  # the published arithmetic is written out for all rows

    @property
    def is_eagle_yet(self) -> bool:
        """Whether the present step is still in the first, EAGLE-1 part."""
        share = self.contract.eagle_share
        return share > 0 and self.global_step < share * self.whole_steps

    @property
    def weights(self) -> Sequence[float]:
        """Of the alignment passes now."""
        assert self.contract.pass_weights is not None
        return self.contract.pass_weights[: 1 if self.is_eagle_yet else None]

    @property
    def num_steps(self) -> int:
        return self.contract.passes

    @property
    def num_passes(self) -> int:
        return len(self.weights) if self.contract.detach else 1

    def passes(self, view: View) -> Iterator[Pass]:
        if self.contract.detach:
            yield from self._alignment_passes(view)
        else:
            yield Pass.joined(list(self._alignment_passes(view)))

    def _alignment_passes(self, view: View) -> Iterator[Pass]:
        contract, needed = self.contract, self.needed(view.rows)
        view = dataclasses.replace(view, rows=dataclasses.replace(view.rows, needed=needed))
        weight = 0.0 if self.is_eagle_yet else contract.top_weight
        term = {"top_weight": weight, "top_k": contract.top_k, "renormalise": contract.renormalise_top_k}
        older: list[Tensor] = []
        state_BRd = self.noisy(self.network.fuse(view.taps_BRF), view)
        for step, pass_weight in enumerate(self.weights):
            predicted_BUd = self._forward(older, state_BRd, view)
            if step + 1 < len(self.weights):
                older.append(state_BRd)
            state_BRd = predicted_BUd.detach() if contract.detach else predicted_BUd
            yield self.objective(predicted_BUd, view, needed, step, **term).weighted(pass_weight, step)

    def _forward(self, older: list[Tensor], newest_BRd: Tensor, view: View) -> Tensor:
        """Predict from the newest state of every root; the older ones give keys.

        The first state is of all rows, the others are of the needed ones only.
        """
        needed = self.needed(view.rows)
        roots = view.of_needed(needed)
        if self.contract.alignment == "shipped":
            context: RolloutContext = ShippedContext(view.rows, view.tokens_BS.shape[1])
        else:
            context = RolloutContext(view.rows, needed.slot_BU, needed.spans)
        for step, state_BRd in enumerate(older):
            # recomputed in the backward pass: only keys and values are kept, so a pass stays as small as EAGLE-1's
            keys = checkpoint(self._keys, state_BRd, roots if step else view, step, use_reentrant=False)
            (context.add_own if step else context.add_native)(*keys)
        if not older:
            return self.network(newest_BRd, view.embedding(), view.position(), context.native, needed.slot_BU)
        last = len(older)
        return self.network(newest_BRd, roots.embedding(last), roots.position(last), context.own)

    def _keys(self, state_BRd: Tensor, view: View, step: int) -> tuple[Tensor, Tensor]:
        return self.network.keys(state_BRd, view.embedding(step), view.position(step))
