"""``eaglelab generate``."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from eaglelab.cli.config import register_resolvers
from eaglelab.cli.decoding import sampling_of
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from eaglelab.decoding import Engine, Sampling
    from eaglelab.regeneration import Regenerated, Source

register_resolvers()


def main() -> None:
    """Stream the answer to one prompt, or let the target answer a file of them for training."""
    # `data` is also a config group, of the training job; Hydra would look for a file data/FILE.yaml
    sys.argv = [f"data.path={word.removeprefix('data=')}" if word.startswith("data=") else word for word in sys.argv]
    _main()


@command("generate")
def _main(config: DictConfig) -> None:
    from eaglelab.evaluation import wants_color

    color = wants_color(config.color)
    _check(config)
    sampling = sampling_of(config)
    quiet_libraries()
    if config.prompt is not None:
        _stream(_engine(config), str(config.prompt), config, sampling, color)
    else:
        _regenerate(config, sampling)


def _check(config: DictConfig) -> None:
    """Raises ValueError for settings that do not go together."""
    if (config.prompt is None) == (config.data.path is None):
        raise ValueError('give one of prompt="a question" and data=FILE.jsonl')
    if config.prompt is not None and not str(config.prompt).strip():
        raise ValueError('the prompt is empty; give prompt="a question"')
    if config.prompt is not None and (config.out is not None or config.server is not None):
        raise ValueError("out= and server= go with data=FILE.jsonl; the answer to a single prompt is printed")
    if config.data.path is not None and config.out is None:
        raise ValueError("data=FILE.jsonl needs out=FILE.jsonl, the file of answers")
    local = config.run is not None or config.target.source is not None
    if local and config.server is not None:
        raise ValueError("either a server answers (server=URL model=NAME), or the engine does (run= or target.source=)")
    if not local and config.server is None:
        raise ValueError(
            "who answers? run=DIR (a drafter and its target), target.source=PATH_OR_HUB_ID (a target alone) or "
            "server=URL model=NAME"
        )


def _engine(config: DictConfig) -> Engine:
    from eaglelab.decoding import Engine, make_tree
    from eaglelab.target import FrozenTarget
    from eaglelab.training import RunFolder

    if config.run is None:
        target = FrozenTarget.load(config.target.source, dtype=config.dtype, device=config.device)
        return Engine(target, compile=config.compile, graphs=config.graphs)
    folder = RunFolder.existing(config.run)
    tree = make_tree(**config.tree)
    target = folder.load_target(source=config.target.source, dtype=config.dtype, device=config.device)
    drafter = folder.load_drafter(target, config.checkpoint) if tree is not None else None
    return Engine(target, drafter, tree, compile=config.compile, graphs=config.graphs)


def _stream(engine: Engine, prompt: str, config: DictConfig, sampling: Sampling, color: bool) -> None:
    from eaglelab.data import encode_prompt
    from eaglelab.evaluation import Stream, mark

    tokenizer = engine.target.tokenizer
    prompt_ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}])
    stream = Stream(engine, tokenizer, prompt_ids, config.max_new_tokens, sampling=sampling)
    for text in mark(stream, color=color):
        print(text, end="", flush=True)
    print("\n", flush=True)
    accepted = [record.accepted for record in stream.rounds]
    tau = f"tau {1 + sum(accepted) / len(accepted):.2f}" if accepted else "no draft round"
    print(
        f"\n\n{len(stream.tokens)} tokens in {len(accepted)} rounds, {sum(accepted)} drafted and accepted, {tau}",
        file=sys.stderr,
    )


def _regenerate(config: DictConfig, sampling: Sampling) -> None:
    from eaglelab.evaluation import load_prompts
    from eaglelab.regeneration import regenerate

    prompts = load_prompts(config.data.path, limit=config.limit)
    result = regenerate(_source(config, sampling), prompts, config.out, keep=config.keep)
    print(_summary(result, str(config.out)))
    if result.interrupted:
        print(f"interrupted; the answers so far are saved. Continue with: eaglelab generate {shlex.join(sys.argv[1:])}")
        raise SystemExit(130)
    if result.kept:
        print(f"train on them with: python train.py data=jsonl data.path={config.out}")


def _source(config: DictConfig, sampling: Sampling) -> Source:
    import os

    from omegaconf import OmegaConf

    from eaglelab.regeneration import ClientSettings, EngineSource, ServerSource

    if config.server is None:
        return EngineSource(
            _engine(config), max_new_tokens=config.max_new_tokens, sampling=sampling, batch=config.batch
        )
    client = OmegaConf.to_container(config.client, resolve=True)
    assert isinstance(client, dict)
    client["body"] = client["body"] or {}
    key = os.environ.get(client.pop("key_variable"))
    return ServerSource(
        config.server,
        config.model,
        max_new_tokens=config.max_new_tokens,
        sampling=sampling,
        settings=ClientSettings(**{str(name): value for name, value in client.items()}),
        key=key,
    )


def _summary(result: Regenerated, out: str) -> str:
    """What was done, what is where."""
    speed = f" in {result.seconds:.1f} s, {result.tokens / max(result.seconds, 1e-9):.0f} tokens/s"
    tau = "" if result.tau is None else f", tau {result.tau:.2f}"
    lines = [
        f"answered   {result.answers:,} questions, {result.tokens:,} tokens{speed}{tau}",
        f"to train   {result.kept.total():,} conversations: {out}",
    ]
    if result.left_out:
        why = ", ".join(f"{count:,} {_WHY.get(reason, reason)}" for reason, count in sorted(result.left_out.items()))
        lines.append(f"left out   {result.left_out.total():,} conversations ({why}): {out}.left_out")
    lines += [f"           {name}: {why}" for name, why in result.failures[:3]]
    return "\n".join(lines)


_WHY = {"length": "cut at max_new_tokens", "context": "cut at the target's last position"}


if __name__ == "__main__":
    main()
