"""Reduction over micro-batches and processes."""

from __future__ import annotations

from tests.mutants.registry import mutant


@mutant(
    "mean of micro-batch means",
    "tests/training/test_measures.py::test_four_uneven_micro_batches_log_what_one_batch_logs",
)
def mean_of_means() -> None:
    from eaglelab.variants import base
    from eaglelab.variants.measures import mean

    update = base.RowMeans.update

    def averaged(self, terms, measures):
        update(self, [(mean(x), 1) for x in terms], {name: (mean(x), 1) for name, x in measures.items()})

    base.RowMeans.update = averaged


@mutant("only the last micro-batch is logged", "tests/training/test_measures.py::test_row_means_by_hand")
def last_micro_batch() -> None:
    from eaglelab.variants.measures import RowMeans

    update = RowMeans.update

    def forgetful(self, *args):
        self.reset()
        update(self, *args)

    RowMeans.update = forgetful


EMPTY_END = "tests/training/test_measures.py::test_a_step_that_ends_with_an_empty_micro_batch_averages_its_gradients"


@mutant("each process divides by its own rows: a mean of means", EMPTY_END)
def rows_of_this_process() -> None:
    from eaglelab.variants import DraftingModule

    DraftingModule.row_count = lambda self, rows: max(rows, 1)


@mutant("gradients stay on their process when the last micro-batch is empty", EMPTY_END)
def gradients_stay_local() -> None:
    from eaglelab.variants import DraftingModule

    DraftingModule._average_gradients = lambda self: None
