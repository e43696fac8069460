"""``eaglelab generate``."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from eaglelab.cli.config import config_dir, register_resolvers
from eaglelab.cli.errors import friendly
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="generate")
@friendly
def main(config: DictConfig) -> None:
    """Stream the answer to one prompt."""
    from eaglelab.data import encode_prompt
    from eaglelab.decoding import Engine, make_tree
    from eaglelab.evaluation import Stream, mark, wants_color
    from eaglelab.training import RunFolder

    if config.temperature != 0:
        raise ValueError(f"temperature={config.temperature}: only greedy decoding so far; use temperature=0")
    color = wants_color(config.color)
    quiet_libraries()
    folder = RunFolder.existing(config.run)
    tree = make_tree(**config.tree)
    target = folder.load_target(source=config.target.source, dtype=config.dtype, device=config.device)
    drafter = folder.load_drafter(target, config.checkpoint) if tree is not None else None
    prompt_ids = encode_prompt(target.tokenizer, [{"role": "user", "content": str(config.prompt)}])
    stream = Stream(Engine(target, drafter, tree), target.tokenizer, prompt_ids, config.max_new_tokens)
    for text in mark(stream, color=color):
        print(text, end="", flush=True)
    rounds, tokens = len(stream.rounds), len(stream.tokens)
    accepted = sum(record.accepted for record in stream.rounds)
    tau = f"tau {1 + accepted / rounds:.2f}" if rounds else "no draft round"
    print(
        f"\n\n{tokens} tokens in {rounds} rounds, {accepted} of them drafted and accepted, {tau}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
