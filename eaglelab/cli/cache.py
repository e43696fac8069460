"""``eaglelab cache`` and ``eaglelab cache verify``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from eaglelab.features.writer import Progress, StoreWriter

register_resolvers()


def main() -> None:
    """Write a store, or with ``verify`` as the first word check one."""
    if sys.argv[1:2] == ["verify"]:
        del sys.argv[1]
        verify()
    else:
        write()


@command("cache")
def write(config: DictConfig) -> None:
    """Write the store, or this process's share of it. Exit code 130 when interrupted."""
    from eaglelab.features.writer import AGAIN
    from eaglelab.training.caching import build_writer

    quiet_libraries()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    writer = build_writer(config, rank, world_size)
    plan = writer.plan
    if rank == 0:
        padding = f"{plan.padding_share:.1%} padding when the target runs"
        print(f"{plan.contents}; {writer.tokens:,} tokens, {writer.bytes / 1e6:,.1f} MB; {padding}")
    try:
        done = writer.write()
    except KeyboardInterrupt:
        print(f"\ninterrupted; finished shards stay. {AGAIN[0].upper()}{AGAIN[1:]}", file=sys.stderr)
        raise SystemExit(130) from None
    print(_told(writer, done))


def _told(writer: StoreWriter, done: Progress) -> str:
    variant = HydraConfig.get().runtime.choices["variant"]
    who = f"process {writer.rank} of {writer.world_size}: " if writer.world_size > 1 else ""
    speed = f", {done.tokens / done.seconds:,.0f} tokens/s" if done.tokens else ""
    lines = [f"{who}{done.written} shards written, {done.found} were there{speed}"]
    if done.complete:
        lines += [
            f"store: {writer.out}, {done.shards} shards",
            f"next: eaglelab train variant={variant} features=store features.path={writer.out}",
        ]
    else:
        lines.append("the store is finished when the other processes are")
    return "\n".join(lines)


@command("cache_verify")
def verify(config: DictConfig) -> None:
    """Check a store; exit code 1 and the place of the difference if there is one."""
    from eaglelab.features import verify as job
    from eaglelab.features.folders import Streaming
    from eaglelab.features.store import FeatureStore
    from eaglelab.target import FrozenTarget

    quiet_libraries()
    store = FeatureStore(config.store, streaming=Streaming(config.cache, config.cache_gib))
    recorded = store.manifest
    target = FrozenTarget.load(
        config.target.source or recorded.target.source,
        dtype=recorded.feature_dtype,
        device=config.device,
        revision=recorded.target.revision if config.target.source is None else None,
    )
    result = job.verify(store, target, rows=config.rows, seed=config.seed)
    print(
        f"{store.path}: every file is as it was written; {result.rows} rows ({result.tokens:,} tokens) recomputed, all "
        f"within rounding ({result.worst:.0%} of it at most)"
    )


if __name__ == "__main__":
    main()
