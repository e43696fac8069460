"""The draft vocabulary and its maps."""

from __future__ import annotations

import dataclasses

from tests.mutants.registry import mutant


@mutant(
    "d2t written as absolute ids",
    "tests/variants/test_eagle3.py::test_vocabulary_is_sorted_by_id_and_takes_the_most_frequent",
)
def absolute_d2t() -> None:
    from eaglelab.data.draft_vocabulary import DraftVocabulary

    DraftVocabulary.d2t = property(lambda self: self.ids_K)


@mutant(
    "map replaced under a loaded head",
    "tests/variants/test_eagle3.py::test_a_head_and_its_map_are_loaded_together_or_not_at_all",
)
def map_rebuilt() -> None:
    from eaglelab.drafters import DraftNetwork, FusedDrafter

    FusedDrafter.load_state_dict = DraftNetwork.load_state_dict


@mutant(
    "coverage counted at every step",
    "tests/variants/test_eagle3.py::test_coverage_is_counted_over_the_training_and_survives_a_resume",
)
def coverage_by_step() -> None:
    from eaglelab.variants import Eagle3Module

    def observe(self, measures):
        for name, measure in measures.items():
            if name.startswith("argmax_coverage"):
                self.coverage.update(*measure)

    Eagle3Module.observe = observe


@mutant("d2t read as absolute ids", "tests/formats/test_golden.py::test_the_recorded_tree[eagle3_draft_d3k4t16_s0-bin]")
def d2t_read_as_absolute() -> None:
    from eaglelab.drafters import FusedDrafter

    FusedDrafter.to_target_ids = lambda self, draft_ids: self.d2t[draft_ids]


@mutant(
    "rows count whatever the target's argmax is",
    "tests/variants/test_eagle3.py::test_rows_count_only_when_the_target_s_argmax_can_be_drafted",
)
def every_row_counts() -> None:
    from eaglelab import objectives
    from eaglelab.variants import eagle3

    distill = objectives.distill_to_draft_vocabulary

    def all_rows(state_MSd, *args, **kw):
        return dataclasses.replace(distill(state_MSd, *args, **kw), counted_S=args[0].sum(0))

    objectives.distill_to_draft_vocabulary = eagle3.distill_to_draft_vocabulary = all_rows
