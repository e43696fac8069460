"""``eaglelab bench decoding``."""

from __future__ import annotations

import json
import sys

from omegaconf import DictConfig

from eaglelab.cli.checks import writable
from eaglelab.cli.config import register_resolvers
from eaglelab.cli.decoding import trees_of
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@command("bench_decoding")
def main(config: DictConfig) -> None:
    """Measure decoding; prints a table. Exit code 130 when interrupted."""
    from eaglelab.data import encode_prompt
    from eaglelab.evaluation import load_prompts
    from eaglelab.evaluation.decoding_speed import measure_decoding, speed_table
    from eaglelab.training import RunFolder

    quiet_libraries()
    folder = RunFolder.existing(config.run)
    trees = trees_of(config)
    for name, value in (
        ("limit", config.limit),
        ("repetitions", config.repetitions),
        ("batch.size", config.batch.size),
    ):
        if value < 1:
            raise ValueError(f"{name}={value}: give at least 1")
    if config.batch.prompts < 0:
        raise ValueError(f"batch.prompts={config.batch.prompts}: give a number of prompts, or 0 for none")
    prompts = load_prompts(str(config.data.path), limit=max(config.limit, config.batch.prompts))
    out = None if config.out is None else writable(config.out)
    target = folder.load_target(source=config.target.source, dtype=config.dtype, device=config.device)
    drafter = folder.load_drafter(target, config.checkpoint)
    ids = [encode_prompt(target.tokenizer, prompt.messages) for prompt in prompts]
    speed = measure_decoding(
        target,
        drafter,
        trees,
        ids[: config.limit],
        max_new_tokens=config.max_new_tokens,
        repetitions=config.repetitions,
        batch=config.batch.size,
        batch_prompts=ids[: config.batch.prompts],
    )
    if not speed.runs["plain"]:
        print("\ninterrupted before a repetition was finished", file=sys.stderr)
        raise SystemExit(130)
    print(f"\n{speed_table(speed)}")
    if out is not None:
        out.write_text(json.dumps(speed.to_dict(), indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {out}")
    if speed.interrupted:
        raise SystemExit(130)


if __name__ == "__main__":
    main()
