"""What is recorded, started early or skipped: the work of another moment passed off as this one's."""

from __future__ import annotations

import torch

from tests.mutants.registry import mutant

GRAPHS = "tests/decoding/test_graphs.py::test_recorded_rounds_decide_the_same"


@mutant("a recorded draft keeps the lengths of its recording", GRAPHS + "[chain-feature-1]")
def lengths_in_a_recorded_draft() -> None:
    from eaglelab.drafters.runtime import DraftState

    fixed_at = DraftState.fixed_at
    DraftState.fixed_at = lambda self, length_B1: fixed_at(self, torch.tensor(self.lengths)[:, None])


@mutant("a recorded verification writes where the recorded one did", GRAPHS + "[none-feature-1]")
def slots_in_a_recorded_verification() -> None:
    from eaglelab.target import KVSlots

    begin = KVSlots.begin

    def of_the_host(self, rows, counts, device, lengths_B=None):
        return begin(self, rows, counts, device, None if lengths_B is None else torch.tensor(self.lengths))

    KVSlots.begin = of_the_host


@mutant(
    "features that were started for a batch that was left out",
    "tests/features/test_ahead.py::test_a_batch_that_was_passed_over_costs_its_pass_alone",
)
def features_of_another_batch() -> None:
    from eaglelab.features.ahead import FeaturesAhead

    FeaturesAhead._has = lambda self, batch: self._started is not None


@mutant(
    "the rows of a batch come back in another order from passes of a few",
    "tests/features/test_source.py::test_passes_of_a_few_rows_are_the_pass_over_all",
)
def passes_in_another_order() -> None:
    from eaglelab.features.source import OnlineFeatures

    plan = OnlineFeatures.plan
    OnlineFeatures.plan = lambda self, batch: plan(self, batch)[::-1]


@mutant(
    "blocks of keys that some rows may not see are taken whole",
    "tests/drafters/test_flex.py::test_blocks_that_are_computed_are_those_with_a_visible_pair",
)
def blocks_taken_whole() -> None:
    from eaglelab.drafters import flex

    within = flex._blocks_within

    def all_of_them(low_BK, high_BK, rows, *, whole):
        return within(low_BK, high_BK, rows, whole=False)

    flex._blocks_within = all_of_them


@mutant("a list goes to the device while the host waits", "tests/test_devices.py::test_the_pretended_device")
def lists_that_are_waited_for() -> None:
    from eaglelab import ops

    ops.on_device = lambda values, device, dtype=None: torch.tensor(values, dtype=dtype).to(device)
