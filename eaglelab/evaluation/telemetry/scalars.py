"""The totals as single numbers, for Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def log_to_wandb(summary: Mapping[str, Any], run: Any, prefix: str = "decode") -> dict[str, float]:
    """Log the summary's numbers to a W&B run (or anything with `log(dict)`), as scalars.

    Names are paths: `decode/tau`, `decode/by_depth/depth_1/conditional`, `decode/batches/batch_4/tokens_per_s`.

    Returns:
        What was logged; values that are None are not.
    """
    scalars = dict(_scalars(prefix, summary))
    run.log(scalars)
    return scalars


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _scalars(f"{name}/{key}", inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            if isinstance(inner, Mapping):  # its first entry says which one it is
                (label, number), *rest = inner.items()
                yield from _scalars(f"{name}/{label}_{number}", dict(rest))
            else:
                yield from _scalars(f"{name}/{place}", inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
