"""Loggers that need a decision at run time."""

from __future__ import annotations

import netrc
import os
import sys
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlparse


def wandb_logger(**settings: Any) -> Any:
    """A W&B logger: online where someone is logged in, offline otherwise (``WANDB_MODE`` wins).

    Raises:
        ValueError: wandb is not installed.
    """
    require_wandb("logger=wandb")
    from lightning.pytorch.loggers import WandbLogger

    if "WANDB_MODE" not in os.environ:
        settings["offline"] = not logged_in()
    return WandbLogger(**settings)


def wandb_run(**settings: Any) -> Any:
    """A W&B run for what is no training: online where someone is logged in, offline otherwise.

    Raises:
        ValueError: wandb is not installed.
    """
    require_wandb("wandb=true")
    import wandb

    if "WANDB_MODE" not in os.environ and not logged_in():
        settings["mode"] = "offline"
    return wandb.init(project="eaglelab", **settings)


def require_wandb(setting: str) -> None:
    """Raises ValueError where wandb is not installed."""
    if getattr(find_spec("wandb"), "origin", None) is None:  # a folder of runs named wandb has no origin
        raise ValueError(f"{setting} needs the package wandb, which is not installed: pip install wandb")


def finish_wandb() -> None:
    """End this process's W&B run, if there is one: the next training of a multirun would log into it."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].finish()


def logged_in() -> bool:
    """Whether W&B credentials are at hand: ``WANDB_API_KEY``, or what ``wandb login`` leaves in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
