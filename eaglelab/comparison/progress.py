"""One bar over the trainings and cells of a comparison, with an estimate of what is left."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from tqdm import tqdm


class Progress:
    """Counts jobs; what is left is estimated from finished jobs of the same kind, else of all cells.

    Args:
        jobs: the kind of every job, done or not.
        expected: seconds of a kind that are known beforehand.
    """

    def __init__(self, jobs: Sequence[Hashable], expected: Mapping[Hashable, float]) -> None:
        self._left = list(jobs)
        self._expected = expected
        self._seen: dict[Hashable, list[float]] = defaultdict(list)
        self._bar = tqdm(
            total=len(jobs),
            desc="compare",
            bar_format="{desc}: {n_fmt} of {total_fmt} |{bar:20}| {elapsed}{postfix}",
            dynamic_ncols=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    @contextmanager
    def job(self, kind: Hashable, label: str) -> Iterator[None]:
        """Do one job, shown by its label."""
        self._show(label)
        began = time.perf_counter()
        yield
        self._seen[kind].append(time.perf_counter() - began)
        self._left.remove(kind)
        self._bar.update()
        self._show(label)

    def skip(self, kind: Hashable) -> None:
        """A job that an earlier call did."""
        self._left.remove(kind)
        self._bar.update()

    def _show(self, label: str) -> None:
        left = self.seconds_left()
        estimate = "" if left is None or not self._left else f", about {_minutes(left)} left"
        self._bar.set_postfix_str(f"{label}{estimate}")

    def seconds_left(self) -> float | None:
        """None while nothing is known about a kind that is still to come."""
        seen = [seconds for of_kind in self._seen.values() for seconds in of_kind]
        total = 0.0
        for kind in self._left:
            known: Any = self._seen.get(kind) or ([self._expected[kind]] if kind in self._expected else seen)
            if not known:
                return None
            total += sum(known) / len(known)
        return total


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
