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

import torch
from torch import Tensor

from eaglelab.data.needed import NeededRows, pick
from eaglelab.drafters import FeatureDrafter, RolloutContext, SharedKeys, ShippedContext
from eaglelab.drafters.shared import Read
from eaglelab.objectives import NoiseLaw, Taught
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
    pass and of the keys; these are computed once and gather the gradients of all passes, which reach the weights with
    the last one (:mod:`eaglelab.drafters.shared`).
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
        needed = self.needed(view.rows)
        view = dataclasses.replace(view, rows=dataclasses.replace(view.rows, needed=needed))
        if self.contract.detach and len(self.weights) > 1:
            yield from self._separate_passes(view, needed)
        else:
            yield Pass.joined(list(self._joint_passes(view, needed)))

    def _joint_passes(self, view: View, needed: NeededRows) -> Iterator[Pass]:
        """One graph, and one context that every pass adds its keys to."""
        roots, context, taught = view.of_needed(needed), self._context(view, needed), list[Taught]()
        state_BUd = self.noisy(self.network.fuse(view.taps_BRF), view)
        for step in range(len(self.weights)):
            if step == 0:
                where = view.embedding(), view.position(), context.native, needed.slot_BU
                state_BUd = self.network(state_BUd, *where)
            else:
                state_BUd = self.network(state_BUd, roots.embedding(step), roots.position(step), context.own)
            yield self._loss(state_BUd, view, needed, step, taught)

    def _separate_passes(self, view: View, needed: NeededRows) -> Iterator[Pass]:
        """Passes that share nothing but keys; the first state is of all rows, the others are of the needed ones."""
        network, roots, older, taught = self.network, view.of_needed(needed), list[SharedKeys](), list[Taught]()
        assert isinstance(network, FeatureDrafter)
        maps, last = network.key_maps(), len(self.weights) - 1
        state_BRd, seen = self.noisy(network.fuse(view.taps_BRF), view), self._context(view, needed)
        for step in range(last):
            of_keys = view if step == 0 else roots
            keys = network.keys_of_data(_reader(of_keys, state_BRd, step), of_keys.position(step), maps)
            older.append(SharedKeys(keys))
            context = _over(seen, older)
            state_BUd = state_BRd if step else pick(state_BRd, needed.slot_BU)
            x_BUd = network.enter(_reader(roots, state_BUd, step))
            predicted_BUd = network.ask(x_BUd, roots.position(step), context.attend)
            state_BRd = predicted_BUd.detach()
            yield self._loss(predicted_BUd, view, needed, step, taught)
        del maps, keys, state_BUd, x_BUd, predicted_BUd  # the last pass holds most
        context = _over(seen, older, last=True)
        x_BUd = network.enter(_reader(roots, state_BRd, last))
        yield self._loss(network.behind(x_BUd, roots.position(last), context.own), view, needed, last, taught)

    def _context(self, view: View, needed: NeededRows) -> RolloutContext:
        if self.contract.alignment == "shipped":
            return ShippedContext(view.rows, view.tokens_BS.shape[1])
        return RolloutContext(view.rows, needed.slot_BU, needed.spans)

    def _loss(self, predicted_BUd: Tensor, view: View, needed: NeededRows, step: int, taught: list[Taught]) -> Pass:
        """The terms of a pass. Passes land on the same rows: what the first one looked up there serves all."""
        contract = self.contract
        term: dict[str, Any] = {
            "top_weight": 0.0 if self.is_eagle_yet else contract.top_weight,
            "top_k": contract.top_k,
            "renormalise": contract.renormalise_top_k,
        }
        if step == 0:
            term["remember"] = taught
        elif taught:
            term["taught"] = taught[0].of(needed.landed[step])
        return self.objective(predicted_BUd, view, needed, step, **term).weighted(self.weights[step], step)


def _reader(view: View, state_BRd: Tensor, step: int) -> Read:
    """What ``fc`` reads at a step; kept as the state alone."""
    return lambda: torch.cat((view.embedding(step), state_BRd), dim=-1)


def _over(context: RolloutContext, older: Sequence[SharedKeys], *, last: bool = False) -> RolloutContext:
    """The context with keys for one pass."""
    context = context.branch()
    for step, keys in enumerate(older):
        (context.add_own if step else context.add_native)(*keys.read(last=last))
    return context
