"""``eaglelab doctor``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from eaglelab.cli.checks import writable
from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from eaglelab.doctor import Diagnosis
    from eaglelab.drafters import DraftNetwork
    from eaglelab.target import FrozenTarget, Tap

register_resolvers()


@command("doctor")
def main(config: DictConfig) -> None:
    """Examine a drafter under every hypothesis and print what fits."""
    from tqdm import tqdm

    from eaglelab.doctor import diagnose, examine, hypotheses_for, report

    if (config.run is None) == (config.source is None):
        raise ValueError("give one of run=DIR and source=FOLDER_OR_HUB_ID (with target.source)")
    if config.limit is not None and config.limit < 2:
        raise ValueError(f"limit={config.limit}: two conversations are the least that shows a spread")
    if config.depth < 1:
        raise ValueError(f"depth={config.depth}: the chain needs at least one step")
    out = None if config.out is None else writable(config.out)
    quiet_libraries()
    name, target, network, taps = _drafter(config)
    hypotheses = hypotheses_for(network, target, taps)
    conversations = list(_answers(config, target))
    bar = tqdm(conversations, desc=f"{len(hypotheses)} hypotheses", unit="chat", leave=False)
    diagnosis = diagnose(examine(network, target, hypotheses, bar, depth=config.depth))
    tokens = sum(len(ids) - length for ids, length in conversations)
    listed, chats = ", ".join(map(str, taps)), len(conversations)
    print(f"{name}: taps {listed}; {chats} answers of the target, {tokens:,} tokens, chain of {config.depth}\n")
    print(report(diagnosis))
    if out is not None:
        _save(diagnosis, out)


def _drafter(config: DictConfig) -> tuple[str, FrozenTarget, DraftNetwork, tuple[Tap, ...]]:
    """Name, target, network and taps of what is to be examined."""
    from eaglelab.target import FrozenTarget
    from eaglelab.training import RunFolder

    if config.run is not None:
        folder = RunFolder.existing(config.run)
        target = folder.load_target(source=config.target.source, dtype=config.dtype, device=config.device)
        network, taps = folder.load_network(config.checkpoint), folder.manifest().taps
        name = str(folder.path)
    else:
        from eaglelab.formats import read_drafter

        if config.target.source is None:
            raise ValueError("source= needs target.source=FOLDER_OR_HUB_ID, or target.source=bundled")
        target = FrozenTarget.load(dtype=config.dtype, device=config.device, **config.target)
        settings = OmegaConf.to_container(config, resolve=True)
        assert isinstance(settings, dict)
        wanted = {key: settings[key] for key in ("format", "taps", "trust", "revision")}
        drafter = read_drafter(str(config.source), target, **wanted)
        network, taps, name = drafter.network(), drafter.manifest.taps, str(config.source)
    return name, target, network.to(device=target.device, dtype=target.dtype).eval(), taps


def _answers(config: DictConfig, target: FrozenTarget) -> Iterator[tuple[list[int], int]]:
    """The target's own greedy answers: token ids, and the length of the prompt."""
    from eaglelab.decoding import Engine
    from eaglelab.evaluation import load_prompts
    from eaglelab.evaluation.chats import chat_encoder

    encode = chat_encoder(target)
    prompts = [list(encode(list(one.messages[:1]))) for one in load_prompts(config.data.path, limit=config.limit)]
    for ids, result in zip(
        prompts, Engine(target).generate(prompts, max_new_tokens=config.max_new_tokens), strict=True
    ):
        yield ids + result.tokens, len(ids)


def _save(diagnosis: Diagnosis, path: Path) -> None:
    findings = [
        {"name": one.hypothesis.name, "trained": one.hypothesis.trained, "change": one.hypothesis.change}
        | {key: value for key, value in dataclasses.asdict(one).items() if key != "hypothesis"}
        for one in diagnosis.findings
    ]
    told = {"verdict": diagnosis.verdict, "best": diagnosis.best.hypothesis.name, "sureness": diagnosis.sureness}
    path.write_text(json.dumps(told | {"findings": findings}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
