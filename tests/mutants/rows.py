"""Addresses off by one row: features, tokens, targets, labels, supervision."""

from __future__ import annotations

import dataclasses

from tests.mutants.registry import EAGLE_LOSS, mutant, replace_default

HARD_LABELS = "tests/variants/test_eagle.py::test_hard_labels_distil_the_token_two_ahead"


@mutant("features shifted by one row", EAGLE_LOSS)
def feature_shift() -> None:
    from eaglelab.variants import View

    of = View.of.__func__

    def shifted(cls, *args):
        view = of(cls, *args)
        return dataclasses.replace(view, taps_BRF=view.taps_BRF.roll(1, dims=1))

    View.of = classmethod(shifted)


@mutant("advanced tokens shifted by one row", EAGLE_LOSS)
def token_shift() -> None:
    from eaglelab.variants import View

    View.embedding = lambda self, step=0: self.target.embed(self.rows.gather(self.tokens_BS, step))


@mutant("targets shifted by one row", EAGLE_LOSS)
def target_shift() -> None:
    from eaglelab.variants import View

    View.teacher = lambda self, step=0: self.rows.gather(self.teacher_BSw, step)


@mutant("loss mask shifted by one row", EAGLE_LOSS)
def supervision_shift() -> None:
    from eaglelab.data import rows

    replace_default(rows.compile_rows, supervise="source")


@mutant(
    "loss mask of a rollout step not moved along",
    "tests/variants/test_hass.py::test_supervision_moves_with_the_predicted_row",
)
def rollout_supervision_stays() -> None:
    from eaglelab.data.rows import Rows

    Rows.supervised_slots = lambda self, step=0: self.supervised_M


@mutant("hard label is the token that the row reads", HARD_LABELS)
def label_shift() -> None:
    from eaglelab.variants import View

    View.label = lambda self, step=0: self.rows.gather(self.tokens_BS, 1 + step)


@mutant("hard rows without their label", HARD_LABELS)
def label_beyond_the_segment() -> None:
    from eaglelab.variants import DraftingModule, EagleModule

    EagleModule.supervised = DraftingModule.supervised


@mutant(
    "hard label not moved along with the pass",
    "tests/variants/test_hass.py::test_gradients_are_those_of_plain_chains[True-hard]",
)
def label_stays() -> None:
    from eaglelab.variants import View

    View.label = lambda self, step=0: self.rows.gather(self.tokens_BS, 2)
