"""What training measures, as means over rows that stay right over micro-batches and processes.

Letters: N quantities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

Measure = tuple[Tensor, Tensor | int]
"""(sum over rows, how many rows)."""


def mean(measure: Measure) -> Tensor:
    """Sum over count; 0 without rows."""
    total, count = measure
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def all_reduced(x: Tensor, group: Any = None) -> list[Tensor]:
    """Sum over the processes: one collective, and the host waits for nothing."""
    x = x.clone()
    torch.distributed.all_reduce(x, group=group)
    return [x]


def stacked(numbers: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """One vector of ``like``'s type and device; the host waits for nothing."""
    return torch.stack([x.to(like) if isinstance(x, Tensor) else like.new_full((), x) for x in numbers])


class RowMeans(Metric):
    """Means of many quantities, pooled over the rows of every update and of all processes.

    The first update after a reset names the quantities; the others, and the other processes, bring the same ones.
    """

    full_state_update = False
    totals_N2: Tensor

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=all_reduced)
        self._names: tuple[str, ...] = ()
        self.add_state("totals_N2", torch.zeros(0, 2, dtype=torch.float64), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, terms: Sequence[Measure], measures: Mapping[str, Measure]) -> None:
        """Add a micro-batch.

        Args:
            terms: what the loss is made of; the quotients add up to it.
            measures: whatever else is to be known, by name.
        """
        numbers = [x for measure in (*terms, *measures.values()) for x in measure]
        update_N2 = stacked(numbers, like=self.totals_N2).view(-1, 2)
        if not self.totals_N2.numel():
            self._names = tuple(measures)
            self.totals_N2 = update_N2
        else:
            assert self._names == tuple(measures), "one optimizer step, one list of quantities"
            self.totals_N2 = self.totals_N2 + update_N2

    def compute(self) -> dict[str, Tensor]:
        """``loss`` and every named mean, fp32."""
        means_N = self.totals_N2[:, 0] / self.totals_N2[:, 1].clamp(min=1)
        terms_n, named_n = means_N.float().split([len(means_N) - len(self._names), len(self._names)])
        return {"loss": terms_n.sum()} | dict(zip(self._names, named_n, strict=True))


class Coverage(Metric):
    """An exact count of rows and of those that are covered, over a whole training and all processes."""

    full_state_update = False
    counts: Tensor

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=all_reduced)
        self.add_state("counts", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, covered: Tensor | int, rows: Tensor | int) -> None:
        self.counts = self.counts + stacked([covered, rows], like=self.counts)

    def compute(self) -> Tensor:
        """int64 [2]: covered rows, rows."""
        return self.counts
