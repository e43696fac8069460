"""Batches in an order that is a pure function of (seed, epoch), from any position in it.

Nothing is counted or stored here: the loader asks for its position when the first batch of a pass is
wanted. Under Lightning the position is the trainer's own progress, which its checkpoints hold, so a resumed
run continues with the very next batch, whatever was prefetched before. Global random streams are neither
read nor advanced.

Letters: N rows of the data set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from eaglelab.data.batch import Batch
from eaglelab.data.packing import PackedRow, PackedRows, collate
from eaglelab.data.rows import SuperviseRule

Position = tuple[int, int]
WAYS = {
    "rows_per_batch": " (data.batch_size times processes)",
    "shuffle": " (features.shuffle_shards, or the store in one place)",
}


def epoch_order(seed: int, epoch: int, count: int, group_N: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """A permutation of ``range(count)``: int64 [N]. Equal arguments give equal orders on every machine.

    Ranks raw Philox words: NumPy keeps those stable across versions, unlike its shuffles. With ``group_N``, rows of a
    lower group come first, and the words decide inside a group.
    """
    words_N = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(words_N, kind="stable") if group_N is None else np.lexsort((words_N, group_N))


def epoch_batches(order_N: NDArray[np.int64], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """The batches of one process; every process has the same number of them.

    A global batch is ``batch_size * world_size`` consecutive rows of the order, the last one what is left. It is dealt
    out as evenly as it goes; a process that gets none of its rows gets ``~row`` of the first one, which stands for that
    row without supervision. So the rows of a global batch do not depend on the number of processes.
    """
    batches = []
    for start in range(0, len(order_N), batch_size * world_size):
        whole_G = order_N[start : start + batch_size * world_size]
        own = np.array_split(whole_G, world_size)[rank]
        batches.append(own.tolist() if len(own) else [~int(whole_G[0])])
    return batches


class _Rows(Sequence[PackedRow]):
    """``rows``, and under ``~index`` the row without supervision."""

    def __init__(self, rows: Sequence[PackedRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PackedRow:  # type: ignore[override]
        if index >= 0:
            return self._rows[index]
        row = self._rows[~index]
        return dataclasses.replace(row, answer_S=np.zeros_like(row.answer_S))


class RowLoader:
    """Iterates over collated batches of ``rows``.

    Args:
        rows: the data set.
        batch_size: rows per process and batch.
        row_length: pad to this length; None pads each batch to its longest row.
        supervise: the row rule.
        seed: shuffles; None keeps the order of ``rows`` in every epoch.
        rank: this process of
        world_size: processes.
        num_workers: worker processes for collation.
        position: called when the first batch of a pass is wanted; returns (epoch, batches done in it).
        looks_ahead: every batch comes with the one that follows.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        batch_size: int,
        row_length: int | None = None,
        supervise: SuperviseRule = "advanced",
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        position: Callable[[], Position] = lambda: (0, 0),
        looks_ahead: bool = False,
    ):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers
        self.position, self.looks_ahead = position, looks_ahead
        self._collate = partial(collate, row_length=row_length, supervise=supervise)

    def __len__(self) -> int:
        """Batches in a whole epoch, also when a pass starts in its middle."""
        return -(-len(self.rows) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[Batch]:
        """Reads the position at the first ``next``, not before: Lightning creates iterators early."""
        batches = self.batches(*self.position())
        yield from looking_ahead(batches) if self.looks_ahead else batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches ``start``, ``start + 1``, ... of ``epoch``."""
        plan = self.plan(epoch)[start:]
        batches = iter(
            DataLoader(
                _Rows(self.rows),  # type: ignore[arg-type]
                batch_sampler=plan,
                collate_fn=self._collate,
                num_workers=self.num_workers,
                pin_memory=torch.cuda.is_available(),
                generator=torch.Generator().manual_seed(0),  # else iter() draws from the global stream
            )
        )
        return self.rows.follow(plan, batches)

    def plan(self, epoch: int) -> list[list[int]]:
        """Row indices of every batch of ``epoch`` on this process."""
        count = len(self.rows)
        if self.seed is None:
            order_N = np.arange(count)
        else:
            order_N = epoch_order(self.seed, epoch, count, self.rows.shuffle_groups(self.seed, epoch))
        return epoch_batches(order_N, self.batch_size, self.rank, self.world_size)

    def state_dict(self) -> dict[str, object]:
        """What a position in the order of batches means; Lightning stores it in every checkpoint."""
        state: dict[str, object] = {
            "data": self.rows.digest,
            "seed": self.seed,
            "rows_per_batch": self.batch_size * self.world_size,
        }
        return state if self.rows.order_name is None else state | {"shuffle": self.rows.order_name}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Check that the saved position means the same here. The number of processes may change: a global batch is the
        same rows however they are dealt.

        Raises:
            ValueError: other data, seed or rows per global batch than in the checkpoint.
        """
        present = self.state_dict()
        for field in (*present, *(set(state) - set(present))):
            here = present.get(field)
            if state.get(field) != here:
                raise ValueError(
                    f"cannot continue in the middle of the data: {field} is {here} here and {state.get(field)} in the "
                    f"checkpoint; restore the old {field}{WAYS.get(field, '')}, or start a new run from its weights"
                )


def looking_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, each with the one that follows."""
    one = next(batches, None)
    while one is not None:
        after = next(batches, None)
        if after is not None:
            after = dataclasses.replace(after, ticket=object())
        yield dataclasses.replace(one, following=after)
        one = after
