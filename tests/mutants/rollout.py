"""Draft steps in training: positions, visibility, gradients, what recurs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.mutants.registry import EAGLE3_CHAIN, HASS_CHAIN, HASS_GOLDEN, mutant

ORACLE = "tests/drafters/test_attention.py::test_values_and_gradients_equal_the_oracle"
INFLUENCE = "tests/drafters/test_attention.py::test_perturbing_one_key_moves_exactly_the_rows_that_may_see_it"


@mutant("rotary position not advanced in the rollout", HASS_CHAIN)
def position_stays() -> None:
    from eaglelab.variants import View

    View.position = lambda self, step=0: self.rows.position_BR


@mutant("rotary position not advanced in the rollout", EAGLE3_CHAIN)
def position_stays_eagle3() -> None:
    position_stays()


def change_visibility(change: Callable) -> None:
    from eaglelab.data.rows import Rows

    visible = Rows.visible
    Rows.visible = lambda self: change(self, visible(self))


@mutant("future rows visible", INFLUENCE)
def future_visible() -> None:
    def same_segment(rows, visible):
        same = rows.segment_BR[:, :, None] == rows.segment_BR[:, None, :]
        return visible | (same & rows.legal_BR[:, None])

    change_visibility(same_segment)


@mutant("other segments visible", INFLUENCE)
def segments_visible() -> None:
    change_visibility(lambda rows, visible: visible | torch.ones_like(visible).tril())


@mutant("padding visible", ORACLE)
def padding_visible() -> None:
    change_visibility(lambda rows, visible: visible | ~rows.legal_BR[:, None, :])


@mutant("draft states of siblings visible", INFLUENCE)
def sibling_visible() -> None:
    from eaglelab.drafters import RolloutContext

    spread = RolloutContext._spread_keys

    def neighbour(self, q):
        k, v, own_k, own_v = spread(self, q)
        return k, v, own_k, [x.roll(1, dims=2) for x in own_v]

    RolloutContext._spread_keys = neighbour


@mutant("own ancestors forgotten", HASS_CHAIN)
def ancestors_forgotten() -> None:
    from eaglelab.drafters import RolloutContext

    add = RolloutContext.add_own

    def only_newest(self, k, v):
        self._own.clear()
        add(self, k, v)

    RolloutContext.add_own = only_newest


@mutant("softmax over scores masked by zero", HASS_GOLDEN + "[masked_pad]")
def masked_by_zero() -> None:
    from eaglelab.variants import hass

    hass.RolloutContext = lambda rows, *slots: hass.ShippedContext(rows, rows.source_BR.shape[1] + 1)


@mutant(
    "spliced states not detached", "tests/variants/test_hass.py::test_gradients_are_those_of_plain_chains[True-soft]"
)
def not_detached() -> None:
    from eaglelab.variants import HassModule, Pass

    HassModule._separate_passes = lambda self, *rest: iter([Pass.joined(list(self._joint_passes(*rest)))])


@mutant(
    "states detached although the switch is off",
    "tests/variants/test_hass.py::test_gradients_are_those_of_plain_chains[False-soft]",
)
def always_detached() -> None:
    from eaglelab.drafters import FeatureDrafter

    forward = FeatureDrafter.forward
    FeatureDrafter.forward = lambda self, state, *rest: forward(self, state.detach(), *rest)


@mutant(
    "only the last pass reaches the keys of earlier states",
    "tests/variants/test_hass.py::test_gradients_are_those_of_plain_chains[True-soft]",
)
def forgotten_readers() -> None:
    from eaglelab.drafters.shared import _Gathered

    _Gathered.backward = staticmethod(lambda ctx, *grads: (None, *grads))


@mutant(
    "gradients of keys counted twice",
    "tests/training/test_literal.py::test_losses_and_gradients_are_the_literal_ones[needed rows-hass]",
)
def gathered_twice() -> None:
    from eaglelab.drafters.shared import _Gathered

    _Gathered.backward = staticmethod(
        lambda ctx, *grads: (None, *(x + 2 * copy.grad for x, copy in zip(grads, ctx.copies, strict=True)))
    )


@mutant(
    "gradient cut between steps of the training-time test", "tests/variants/test_eagle3.py::test_golden_seven_steps"
)
def detached_steps() -> None:
    from eaglelab.drafters import FusedDrafter

    forward = FusedDrafter.forward
    FusedDrafter.forward = lambda self, state, *rest: forward(
        self, state.detach() if rest[1].min() > 0 else state, *rest
    )


@mutant(
    "states not detached although the switch is on",
    "tests/variants/test_eagle3.py::test_gradients_are_those_of_plain_chains[True-settings0]",
)
def never_detached() -> None:
    from eaglelab.variants import Eagle3Module

    init = Eagle3Module.__init__
    Eagle3Module.__init__ = lambda self, *args, **kw: init(self, *args, **kw | {"detach": False})


@mutant(
    "post-norm state fed back",
    EAGLE3_CHAIN.replace("steps_equal_a_sequential_cached_draft_chain", "golden_seven_steps"),
)
def post_norm_recurrence() -> None:
    from eaglelab.drafters import FusedDrafter

    forward = FusedDrafter.forward
    FusedDrafter.forward = lambda self, *args: self.norm(forward(self, *args))


@mutant(
    "normed state normed again by the head",
    "tests/drafters/test_fused.py::test_a_normed_state_recurs_and_is_not_normed_again",
)
def normed_twice() -> None:
    from eaglelab.drafters import FusedDrafter

    FusedDrafter.head_input = lambda self, state: self.norm(state)


@mutant(
    "normed state fed back in training, head trained on it normed again",
    "tests/variants/test_eagle3.py::test_gradients_are_those_of_plain_chains[False-settings1]",
)
def normed_twice_in_the_loss() -> None:
    normed_twice()
