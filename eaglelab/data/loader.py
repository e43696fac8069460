"""Batches in an order that is a pure function of (seed, epoch), from any position in it.

Nothing is counted or stored here: the loader asks for its position when the first batch of a pass is
wanted. Under Lightning the position is the trainer's own progress, which its checkpoints hold, so a resumed
run continues with the very next batch, whatever was prefetched before. Global random streams are neither
read nor advanced.

Letters: N rows of the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from eaglelab.data.batch import Batch
from eaglelab.data.packing import PackedRows, collate
from eaglelab.data.rows import SuperviseRule

Position = tuple[int, int]


def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """A permutation of ``range(count)``: int64 [N]. Equal arguments give equal orders on every machine.

    Ranks raw Philox words: NumPy keeps those stable across versions, unlike its shuffles.
    """
    words_N = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(words_N, kind="stable")


def epoch_batches(order_N: NDArray[np.int64], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """The batches of one process: disjoint rows, the same number of batches on every process.

    Each global batch is ``batch_size * world_size`` consecutive rows of the order. The rest at the end
    becomes one smaller batch with equally many rows per process; fewer than ``world_size`` rows are left out
    of this epoch.
    """
    batches = []
    for start in range(0, len(order_N), batch_size * world_size):
        each = min(batch_size, (len(order_N) - start) // world_size)
        if each:
            first = start + rank * each
            batches.append(order_N[first : first + each].tolist())
    return batches


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

    Raises:
        ValueError: fewer rows than processes.
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
    ):
        if len(rows) < world_size:
            raise ValueError(
                f"{len(rows)} packed rows cannot be shared by {world_size} processes; give more data, "
                "use a smaller row_length, or fewer devices"
            )
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.world_size, self.num_workers = rank, world_size, num_workers
        self.position = position
        self._collate = partial(collate, row_length=row_length, supervise=supervise)

    def __len__(self) -> int:
        """Batches in a whole epoch, also when a pass starts in its middle."""
        whole, rest = divmod(len(self.rows), self.batch_size * self.world_size)
        return whole + (rest >= self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        """Reads the position at the first ``next``, not before: Lightning creates iterators early."""
        yield from self.batches(*self.position())

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches ``start``, ``start + 1``, ... of ``epoch``."""
        return iter(
            DataLoader(
                self.rows,  # type: ignore[arg-type]
                batch_sampler=self.plan(epoch)[start:],
                collate_fn=self._collate,
                num_workers=self.num_workers,
                pin_memory=torch.cuda.is_available(),
                generator=torch.Generator().manual_seed(0),  # else iter() draws from the global stream
            )
        )

    def plan(self, epoch: int) -> list[list[int]]:
        """Row indices of every batch of ``epoch`` on this process."""
        count = len(self.rows)
        order_N = np.arange(count) if self.seed is None else epoch_order(self.seed, epoch, count)
        return epoch_batches(order_N, self.batch_size, self.rank, self.world_size)

    def state_dict(self) -> dict[str, object]:
        """What a position in the order of batches means; Lightning stores it in every checkpoint."""
        return {
            "data": self.rows.digest,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Check that the saved position means the same here.

        Raises:
            ValueError: other data, seed, batch size or number of processes than in the checkpoint.
        """
        for field, here in self.state_dict().items():
            if state[field] != here:
                raise ValueError(
                    f"cannot continue in the middle of the data: {field} is {here} here and {state[field]} "
                    f"in the checkpoint; restore the old {field}, or start a new run from its weights"
                )
