"""``eaglelab tune``."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from eaglelab.cli.checks import writable
from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@command("tune")
def main(config: DictConfig) -> None:
    """Name the fastest tree on this machine and measure it. Exit code 130 when interrupted."""
    import json

    from eaglelab.data import encode_prompt
    from eaglelab.decoding import make_tree
    from eaglelab.evaluation import load_prompts
    from eaglelab.training import RunFolder
    from eaglelab.tuning import Grid, tune, tuning_table

    quiet_libraries()
    folder = RunFolder.existing(config.run)
    default = make_tree(**config.tree)
    if default is None:
        raise ValueError("tree=none drafts nothing; name the tree to beat, such as tree=dynamic or tree=chain")
    if config.limit < 1 or config.measure < 1:
        raise ValueError(f"limit={config.limit}, measure={config.measure}: both need at least one prompt")
    grid = Grid(list(config.widths), config.depth, list(config.budgets), [float(floor) for floor in config.floors])
    prompts = load_prompts(str(config.data.path), limit=config.limit + config.measure)
    if len(prompts) <= config.limit:
        raise ValueError(
            f"{config.data.path} has {len(prompts)} prompts and limit={config.limit} takes them all; leave some to "
            "measure on"
        )
    out = writable(str(config.out or folder.path / "tuning.json"))
    target = folder.load_target(source=config.target.source, dtype=config.dtype, device=config.device)
    drafter = folder.load_drafter(target, config.checkpoint)
    ids = [encode_prompt(target.tokenizer, prompt.messages) for prompt in prompts]
    try:
        found = tune(
            target,
            drafter,
            default,
            ids[: config.limit],
            ids[config.limit :],
            grid,
            max_new_tokens=config.max_new_tokens,
            batch=config.batch,
            repetitions=config.repetitions,
        )
    except KeyboardInterrupt:
        print("\ninterrupted before a tree could be named; the same command starts again", file=sys.stderr)
        raise SystemExit(130) from None
    out.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    print(f"\n{tuning_table(found)}\n\nwritten: {out}")
    if found.interrupted:
        raise SystemExit(130)


if __name__ == "__main__":
    main()
