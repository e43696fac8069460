"""Tree policies: which candidates are drafted in a round.

A new policy is a class with the members of `protocol.TreePolicy`, entered in `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eaglelab.decoding.policies.dynamic import DynamicTree
from eaglelab.decoding.policies.fixed import STATIC_25, read_paths
from eaglelab.decoding.policies.sampled import SampledTree
from eaglelab.decoding.policies.static import Chain, StaticTree
from eaglelab.decoding.protocol import TreePolicy

__all__ = ["POLICIES", "STATIC_25", "Chain", "DynamicTree", "SampledTree", "StaticTree", "make_tree"]

Paths = str | Path | Sequence[Sequence[int]]


def _static(*, paths: Paths | None = None) -> StaticTree:
    if paths is None:
        return StaticTree()
    return StaticTree.from_file(paths) if isinstance(paths, str | Path) else StaticTree(paths)


def _sampled(*, widths: Sequence[int] | None = None, paths: Paths | None = None) -> SampledTree:
    return SampledTree(widths, read_paths(paths) if isinstance(paths, str | Path) else paths)


def _none() -> None:
    return None


POLICIES: dict[str, Callable[..., TreePolicy | None]] = {
    "chain": Chain,
    "static": _static,
    "none": _none,
    "dynamic": DynamicTree,
    "sampled": _sampled,
}


def make_tree(name: str, **settings: Any) -> TreePolicy | None:
    """The policy called `name`; `none` gives None, plain decoding.

    Args:
        settings: the policy's own: `depth` for chain; `paths` (a list, or a JSON file) for static; `width`, `depth`
            and `budget` for dynamic; `widths` or `paths` for sampled.

    Raises:
        ValueError: unknown name, or settings that this policy does not have.
    """
    if name not in POLICIES:
        raise ValueError(f"tree={name!r} is unknown; choose one of: {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**settings)
    except TypeError as error:
        raise ValueError(f"tree={name}: {error}") from error
