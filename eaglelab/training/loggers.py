"""Loggers that need a decision at run time."""

from __future__ import annotations

import os
from typing import Any


def wandb_logger(**settings: Any) -> Any:
    """A W&B logger: online where someone is logged in, offline otherwise (``WANDB_MODE`` wins)."""
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    if "WANDB_MODE" not in os.environ:
        settings["offline"] = not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
    return WandbLogger(**settings)
