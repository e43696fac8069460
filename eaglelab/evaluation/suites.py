"""Benchmark suites: questions by the name of a shipped suite, or from any file of the same shape."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from eaglelab.assets import SuiteName, bundled_suite
from eaglelab.data.conversations import Conversation, load_prompts

SUITES: tuple[str, ...] = get_args(SuiteName)


@dataclass(frozen=True)
class Suite:
    """The questions of one benchmark that are to be answered.

    name: the shipped suite's, or the file's without its ending.
    prompts: in the order of the file.
    """

    name: str
    prompts: tuple[Conversation, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of ids, categories and messages, in their order; references do not count."""
        rows = [[one.id, one.category, list(one.messages)] for one in self.prompts]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def load_suite(source: str, limit: int | None = None) -> Suite:
    """Questions of a shipped suite (one of `SUITES`), or of a file that `load_prompts` reads.

    Args:
        limit: keep this many, dealt evenly over the categories; None: all. Of one category these are the first ones.

    Raises:
        ValueError: neither a suite's name nor a file, a limit below 1, or a damaged file.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} keeps no question; use a positive number, or null for all")
    if source in SUITES:
        path = bundled_suite(source)  # type: ignore[arg-type]
    elif Path(source).expanduser().exists() or "/" in source or "." in source:
        path = source
    else:
        raise ValueError(
            f"no suite and no file is called {source!r}; shipped are {', '.join(SUITES)}; any other JSONL file of "
            "{question_id, category, turns} by its path"
        )
    name = source if source in SUITES else Path(source).name.split(".")[0]
    return Suite(name, tuple(spread(load_prompts(path), limit)))


def spread(prompts: Sequence[Conversation], limit: int | None) -> list[Conversation]:
    """`limit` prompts with as equal a share of every category as can be, in their old order."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    seen: dict[str, int] = defaultdict(int)
    ranked = []
    for place, prompt in enumerate(prompts):
        ranked.append((seen[prompt.category], place))
        seen[prompt.category] += 1
    chosen = sorted(place for _, place in sorted(ranked)[:limit])
    return [prompts[place] for place in chosen]
