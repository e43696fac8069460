"""Measuring things against each other on a machine that other jobs share.

Contestants run one after the other, again and again, every second time in reverse order; what counts are ratios within
a repetition, of which the median and the quartiles are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

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

    def to_dict(self) -> dict[str, Any]:
        return {"median": self.median, "quartile_1": self.low, "quartile_3": self.high, "values": list(self.values)}


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """`above[i] / below[i]` of every repetition that both have."""
    return Spread.of([one / other for one, other in zip(above, below, strict=False)])


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
    names = list(contestants)
    with tqdm(total=(repetitions + 1) * len(names), desc=progress, unit="run", disable=progress is None) as bar:
        try:
            for repetition in range(repetitions + 1):
                found = {}
                for name in reversed(names) if repetition % 2 else names:
                    found[name] = contestants[name]()
                    bar.update()
                if repetition:
                    for name, result in found.items():
                        results[name].append(result)
        except KeyboardInterrupt:
            return results, True
    return results, False
