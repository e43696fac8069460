"""``eaglelab bench kernels``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from eaglelab.cli.checks import measured_device, writable
from eaglelab.cli.errors import command

if TYPE_CHECKING:
    import torch

Measurement = Callable[[], tuple[list[dict[str, Any]], str, bool]]
"""What is written, what is printed (nothing where nothing was finished), and whether an interrupt (Ctrl-C) ended it."""


@command("bench_kernels")
def main(config: DictConfig) -> None:
    """Measure operations in all their implementations; prints tables. Exit code 130 when interrupted."""
    import torch

    if config.repetitions < 1:
        raise ValueError(f"repetitions={config.repetitions}: give at least 1")
    device, where = measured_device(config.device)
    for name in OPERATIONS:
        if not isinstance(config[name], DictConfig | None):
            raise ValueError(f"{name}={config[name]}: give single sizes ({name}.rows=64), or null to leave it out")
    tables = {name: operation(config, device) for name, operation in OPERATIONS.items() if config[name]}
    if not tables:
        raise ValueError(f"nothing is left to measure: leave {' or '.join(OPERATIONS)} as it is")
    out = None if config.out is None else writable(config.out)
    print(f"{device}, {where}, torch {torch.__version__}; {config.repetitions} repetitions", flush=True)
    found: dict[str, Any] = {"device": f"{device}, {where}", "torch": torch.__version__, "interrupted": False}
    for name, measure in tables.items():
        found[name], table, found["interrupted"] = measure()
        if table:
            print(f"\n{table}", flush=True)
        if found["interrupted"]:
            break
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {out}")
    if found["interrupted"]:
        raise SystemExit(130)


def _soft_cross_entropy(config: DictConfig, device: torch.device) -> Measurement:
    """The cases that are asked for.

    Raises:
        ValueError: sizes below 1, an unknown number type, or no case.
    """
    from eaglelab.target.loading import DTYPES
    from eaglelab.training.operation_speed import measure_operation, operation_table, soft_cross_entropy_speed

    asked = config.soft_cross_entropy
    sizes, drafted, dtypes = (_listed(asked[name]) for name in ("vocab_sizes", "draft_vocab_sizes", "dtypes"))
    for name, value in (("rows", asked.rows), ("steps", asked.steps), *(("vocab_sizes", V) for V in sizes + drafted)):
        _require_whole(f"soft_cross_entropy.{name}", value, least=1)
    _require_known("soft_cross_entropy.dtypes", dtypes)
    shapes = [(V, 1) for V in sizes] + [(V, asked.steps) for V in drafted]
    if not shapes or not dtypes:
        raise ValueError("soft_cross_entropy: no case is left; name vocab_sizes or draft_vocab_sizes, and dtypes")
    operation = soft_cross_entropy_speed(
        asked.rows, shapes, [DTYPES[one] for one in dtypes], device, compiled=config.compiled
    )

    def measure() -> tuple[list[dict[str, Any]], str, bool]:
        measured, interrupted = measure_operation(operation, device, repetitions=config.repetitions)
        table = operation_table(operation, measured) if measured else ""
        return [one.to_dict() for one in measured], table, interrupted

    return measure


def _attention(config: DictConfig, device: torch.device) -> Measurement:
    """Every combination of segments, own keys and number types.

    Raises:
        ValueError: sizes below 1 (own keys: 0) or that do not go together, an unknown number type, or no case.
    """
    from eaglelab.target.loading import DTYPES
    from eaglelab.training.attention_speed import AttentionContest, attention_contest, attention_table, check_sizes

    asked = config.attention
    segments, steps, dtypes = (_listed(asked[name]) for name in ("segments", "steps", "dtypes"))
    for name in ("rows", "heads", "groups", "head_dim", "batch"):
        _require_whole(f"attention.{name}", asked[name], least=1)
    for name, listed, least in (("segments", segments, 1), ("steps", steps, 0)):
        for value in listed:
            _require_whole(f"attention.{name}", value, least)
    _require_known("attention.dtypes", dtypes)
    cases = list(itertools.product(dtypes, segments, steps))
    if not cases:
        raise ValueError("attention: no case is left; name segments, steps and dtypes")
    for one in segments:
        check_sizes(asked.rows, asked.heads, asked.groups, one)

    def measure() -> tuple[list[dict[str, Any]], str, bool]:
        contests: list[AttentionContest] = []
        interrupted = False
        for dtype, pieces, own in cases:
            sizes = asked.rows, asked.heads, asked.head_dim, asked.batch, pieces, own
            contest = attention_contest(
                *sizes, device, DTYPES[dtype], config.repetitions, groups=asked.groups, progress="attention"
            )
            interrupted = contest.interrupted
            if interrupted:
                break
            contests.append(contest)
        return [one.to_dict() for one in contests], attention_table(contests) if contests else "", interrupted

    return measure


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, ListConfig) else [value]


def _require_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value}: give whole numbers from {least} on")


def _require_known(name: str, dtypes: list[Any]) -> None:
    from eaglelab.target.loading import DTYPES

    if unknown := [one for one in dtypes if one not in DTYPES]:
        raise ValueError(f"{name}={unknown[0]!r} is unknown: use some of {', '.join(DTYPES)}")


OPERATIONS: dict[str, Callable[[DictConfig, torch.device], Measurement]] = {
    "soft_cross_entropy": _soft_cross_entropy,
    "attention": _attention,
}
"""By the name of their settings."""


if __name__ == "__main__":
    main()
