"""Configurations composed beside the one of the verb that runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, open_dict

from eaglelab.cli.config import config_dir, register_resolvers


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """A file of ``configs/`` with overrides, whether or not Hydra runs already.

    Raises:
        HydraException, OmegaConfBaseException: an override that does not parse, or names nothing.
    """
    outer = GlobalHydra.instance().hydra  # of the verb that asks, if Hydra started it
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=config_dir(), job_name=config_name, version_base="1.3"):
            return compose(config_name=config_name, overrides=list(overrides))
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().initialize(outer)


def compose_training(overrides: Sequence[str], run_dir: str | Path) -> DictConfig:
    """``configs/train.yaml`` with overrides, as ``eaglelab train OVERRIDES hydra.run.dir=RUN_DIR`` would see it.

    Raises:
        HydraException, OmegaConfBaseException: an override that does not parse, or names nothing.
    """
    register_resolvers()
    config = compose_config("train", overrides)
    with open_dict(config):
        config.run_dir = str(run_dir)
    return config
