"""``eaglelab generate``."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig

from eaglelab.cli.config import config_dir, register_resolvers
from eaglelab.cli.decoding import sampling_of
from eaglelab.cli.errors import friendly
from eaglelab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from eaglelab.decoding import Engine, GenerationResult, Sampling

register_resolvers()


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="generate")
@friendly
def main(config: DictConfig) -> None:
    """Stream the answer to one prompt, or answer a file of them."""
    from eaglelab.decoding import Engine, make_tree
    from eaglelab.evaluation import wants_color
    from eaglelab.training import RunFolder

    color = wants_color(config.color)
    if (config.prompt is None) == (config.prompts is None):
        raise ValueError('give one of prompt="a question" and prompts=FILE.jsonl')
    if config.out is not None and config.prompts is None:
        raise ValueError("out=FILE goes with prompts=FILE; a single answer is printed")
    if config.out is not None and Path(config.out).exists():
        raise ValueError(f"out={config.out} exists; choose another name or remove it")
    sampling = sampling_of(config)
    quiet_libraries()
    folder = RunFolder.existing(config.run)
    tree = make_tree(**config.tree)
    target = folder.load_target(source=config.target.source, dtype=config.dtype, device=config.device)
    drafter = folder.load_drafter(target, config.checkpoint) if tree is not None else None
    engine = Engine(target, drafter, tree)
    if config.prompts is None:
        _stream(engine, str(config.prompt), config, sampling, color)
    else:
        _answer_all(engine, config, sampling)


def _stream(engine: Engine, prompt: str, config: DictConfig, sampling: Sampling, color: bool) -> None:
    from eaglelab.data import encode_prompt
    from eaglelab.evaluation import Stream, mark

    tokenizer = engine.target.tokenizer
    prompt_ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}])
    stream = Stream(engine, tokenizer, prompt_ids, config.max_new_tokens, sampling=sampling)
    for text in mark(stream, color=color):
        print(text, end="", flush=True)
    print("\n", flush=True)
    _totals(len(stream.tokens), [record.accepted for record in stream.rounds])


def _answer_all(engine: Engine, config: DictConfig, sampling: Sampling) -> None:
    from tqdm import tqdm

    from eaglelab.evaluation import answer_all, load_prompts

    prompts = load_prompts(config.prompts, limit=config.limit)
    questions = sum(message["role"] == "user" for prompt in prompts for message in prompt.messages)
    accepted: list[int] = []
    tokens = 0
    bar = tqdm(total=questions, desc="generate", unit="answer")

    def count(result: GenerationResult) -> None:
        nonlocal tokens
        tokens += len(result.tokens)
        accepted.extend(result.accepted)
        bar.set_postfix(tau=f"{1 + sum(accepted) / max(len(accepted), 1):.2f}", tokens=tokens, refresh=False)
        bar.update()

    settings = {"max_new_tokens": config.max_new_tokens, "sampling": sampling, "batch": config.batch}
    with ExitStack() as stack:
        stack.enter_context(closing(bar))
        out = stack.enter_context(open(config.out, "x", encoding="utf-8")) if config.out else sys.stdout
        for one in answer_all(engine, prompts, **settings, on_answer=count):
            print(json.dumps(one.to_dict(), ensure_ascii=False), file=out, flush=True)
    _totals(tokens, accepted)


def _totals(tokens: int, accepted: list[int]) -> None:
    rounds = len(accepted)
    tau = f"tau {1 + sum(accepted) / rounds:.2f}" if rounds else "no draft round"
    print(
        f"\n\n{tokens} tokens in {rounds} rounds, {sum(accepted)} of them drafted and accepted, {tau}", file=sys.stderr
    )


if __name__ == "__main__":
    main()
