"""Measuring things against each other on a machine that other jobs share.

Contestants run one after the other, again and again, every second time in reverse order; what counts are ratios within
a repetition, of which the median and the quartiles are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one number over the repetitions."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation; those of a single value are the value.

        Raises:
            ValueError: no values.
        """
        if not values:
            raise ValueError("no repetition was finished, so there is nothing to show")
        cuts = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(cuts[1], cuts[0], cuts[2], tuple(values))

    def times(self) -> str:
        """As a factor with its quartiles: ``2.28x (2.26 to 2.47)``."""
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"

    def to_dict(self) -> dict[str, Any]:
        return {"median": self.median, "quartile_1": self.low, "quartile_3": self.high, "values": list(self.values)}


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """`above[i] / below[i]` of every repetition that both have."""
    return Spread.of([one / other for one, other in zip(above, below, strict=False)])


def turns(
    contestants: Mapping[Name, Callable[[], Result]], repetitions: int, on_run: Callable[[], object] | None = None
) -> Iterator[tuple[int, dict[Name, Result]]]:
    """Run all contestants once for warming up (number 0) and `repetitions` times: number and results of each time.

    Args:
        on_run: called after every run of a contestant.
    """
    names = list(contestants)
    for number in range(repetitions + 1):
        found = {}
        for name in reversed(names) if number % 2 else names:
            found[name] = contestants[name]()
            if on_run is not None:
                on_run()
        yield number, found


def alternate(
    contestants: Mapping[str, Callable[[], Result]], repetitions: int, *, progress: str | None = None
) -> tuple[dict[str, list[Result]], bool]:
    """Run all contestants `repetitions` times, after once for warming up.

    Args:
        progress: name of a progress bar; None: no bar.

    Returns:
        Results by contestant, one per finished repetition, and whether an interrupt (Ctrl-C) ended the measurement
        early; an unfinished repetition leaves nothing.
    """
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    with tqdm(total=(repetitions + 1) * len(contestants), desc=progress, unit="run", disable=progress is None) as bar:
        try:
            for number, found in turns(contestants, repetitions, bar.update):
                if number:
                    for name, result in found.items():
                        results[name].append(result)
        except KeyboardInterrupt:
            return results, True
    return results, False
