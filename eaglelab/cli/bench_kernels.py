"""``eaglelab bench kernels``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from eaglelab.cli.checks import writable
from eaglelab.cli.errors import command

if TYPE_CHECKING:
    import torch

    from eaglelab.training.operation_speed import Operation


@command("bench_kernels")
def main(config: DictConfig) -> None:
    """Measure operations in all their implementations; prints tables. Exit code 130 when interrupted."""
    import torch

    from eaglelab.training.operation_speed import measure_operation, operation_table

    if config.repetitions < 1:
        raise ValueError(f"repetitions={config.repetitions}: give at least 1")
    if config.device not in ("cpu", "cuda"):
        raise ValueError(f"device={config.device}: use cpu or cuda")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: no GPU is found here; use cpu")
    device = (
        torch.device(config.device, torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    )
    tables = {name: operation(config, device) for name, operation in OPERATIONS.items() if config[name]}
    if not tables:
        raise ValueError(f"nothing is left to measure: leave {' or '.join(OPERATIONS)} as it is")
    out = None if config.out is None else writable(config.out)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{device}, {where}, torch {torch.__version__}; {config.repetitions} repetitions", flush=True)
    found: dict[str, Any] = {"device": f"{device}, {where}", "torch": torch.__version__, "interrupted": False}
    for name, operation in tables.items():
        measured, interrupted = measure_operation(operation, device, repetitions=config.repetitions)
        found[name], found["interrupted"] = [one.to_dict() for one in measured], interrupted
        if measured:
            print(f"\n{operation_table(operation, measured)}", flush=True)
        if interrupted:
            break
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {out}")
    if found["interrupted"]:
        raise SystemExit(130)


def _soft_cross_entropy(config: DictConfig, device: torch.device) -> Operation:
    """The cases that are asked for.

    Raises:
        ValueError: sizes below 1, an unknown number type, or no case.
    """
    from eaglelab.target.loading import DTYPES
    from eaglelab.training.operation_speed import soft_cross_entropy_speed

    asked = config.soft_cross_entropy
    sizes, drafted, dtypes = (_listed(asked[name]) for name in ("vocab_sizes", "draft_vocab_sizes", "dtypes"))
    for name, value in (("rows", asked.rows), ("steps", asked.steps), *(("vocab_sizes", V) for V in sizes + drafted)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"soft_cross_entropy.{name}={value}: give whole numbers from 1 on")
    if unknown := [one for one in dtypes if one not in DTYPES]:
        raise ValueError(f"soft_cross_entropy.dtypes={unknown[0]!r} is unknown: use some of {', '.join(DTYPES)}")
    shapes = [(V, 1) for V in sizes] + [(V, asked.steps) for V in drafted]
    if not shapes or not dtypes:
        raise ValueError("soft_cross_entropy: no case is left; name vocab_sizes or draft_vocab_sizes, and dtypes")
    return soft_cross_entropy_speed(
        asked.rows, shapes, [DTYPES[one] for one in dtypes], device, compiled=config.compiled
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, ListConfig) else [value]


OPERATIONS = {"soft_cross_entropy": _soft_cross_entropy}
"""By the name of their settings."""


if __name__ == "__main__":
    main()
