"""Settings of the trainer that Lightning would take and this project cannot use."""

from __future__ import annotations

from typing import Any

import torch

from eaglelab.target.loading import as_dtype

HALF = ("bf16-mixed", "16-mixed")
WHOLE = ("32-true", "32")


def require_budget(trainer: Any) -> None:
    """Raises ValueError for a training of no step, or a validation after none.

    Args:
        trainer: the ``trainer`` group.
    """
    if trainer.get("max_steps") == 0:
        raise ValueError("trainer.max_steps=0 trains nothing; give at least 1, or -1 to stop by trainer.max_epochs")
    every = trainer.get("val_check_interval")
    if isinstance(every, int | float) and every <= 0:
        raise ValueError(f"trainer.val_check_interval={every}: validate every so many steps, at least 1")


def require_precision(precision: object, target_dtype: str | torch.dtype) -> None:
    """The drafter's weights stay fp32, and it can multiply the target's features.

    Args:
        precision: ``trainer.precision``.
        target_dtype: ``target.dtype``.

    Raises:
        ValueError: another precision, or half-precision features under a full-precision drafter.
    """
    if str(precision) not in (*HALF, *WHOLE):
        raise ValueError(
            f"trainer.precision={precision}: the drafter trains with 32-true, bf16-mixed or 16-mixed (its weights stay "
            "fp32)"
        )
    if str(precision) in WHOLE and as_dtype(target_dtype).itemsize < 4:
        raise ValueError(
            f"target.dtype={target_dtype} gives half-precision features, which a drafter under "
            f"trainer.precision={precision} cannot multiply; add trainer.precision=bf16-mixed, or set "
            "target.dtype=float32"
        )
