"""The caching job: a composed configuration in, the writer of a feature store out."""

from __future__ import annotations

import os
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, open_dict

from eaglelab.features.contents import Contents
from eaglelab.features.data import template_digest
from eaglelab.features.plan import ROW_SETTINGS
from eaglelab.features.writer import StoreWriter
from eaglelab.target import FrozenTarget
from eaglelab.training.job import build_data


def build_writer(config: DictConfig, rank: int = 0, world_size: int = 1) -> StoreWriter:
    """Load the target, prepare the data and plan the store, as ``configs/cache.yaml`` describes it.

    Raises:
        ValueError: data, target or settings that cannot be cached, with the way out.
    """
    for name in ("shard_mib", "batch_tokens"):
        if not config[name] > 0:
            raise ValueError(f"{name}={config[name]} must be more than 0")
    target = FrozenTarget.load(**config.target, device=_device(config.device))
    variant: Any = get_class(config.variant["_target_"])
    taps = variant.taps_for(target, config.variant.get("taps"))
    contents = Contents.of(target, taps, config.dtype, config.teacher, config.top_k)
    with open_dict(config):
        config.seed = 0  # the order of training, which a store does not have
    data = build_data(config, target)
    data.setup()
    settings = {name: config.data.get(name) for name in ROW_SETTINGS}
    settings["supervise"] = config.variant.supervise
    settings["chat_template"] = template_digest(config.data.get("chat_template"))
    return StoreWriter(
        target,
        data,
        settings,
        taps,
        contents,
        config.out,
        shard_bytes=int(config.shard_mib * 2**20),
        batch_tokens=config.batch_tokens,
        rank=rank,
        world_size=world_size,
    )


def _device(name: str) -> str:
    """``cuda`` is the device of this process where several share a machine."""
    local = os.environ.get("LOCAL_RANK")
    return f"{name}:{local}" if local is not None and name == "cuda" else name
