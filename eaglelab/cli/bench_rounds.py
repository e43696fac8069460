"""``eaglelab bench rounds``."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from eaglelab.cli.checks import measured_device, writable
from eaglelab.cli.decoding import trees_of
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

DRAFT_VOCABULARY = 32000
"""Of EAGLE-3 where the target's is larger."""


NETWORKS = {"fused": "eagle3", "feature": "eagle"}
"""A variant that decodes with it."""


@command("bench_rounds")
def main(config: DictConfig) -> None:
    """Measure rounds of decoding; prints a table. Exit code 1 where a text was not that of plain decoding, or the
    acceptance not the scripted one; 130 when interrupted."""
    import torch

    from eaglelab.evaluation.round_speed import (
        check_script,
        measure_rounds,
        random_drafter,
        random_target,
        room_for,
        rounds_table,
    )
    from eaglelab.target.loading import as_dtype
    from eaglelab.target.random_llama import LlamaShape

    quiet_libraries()
    if config.network not in NETWORKS:
        raise ValueError(f"network={config.network} is unknown: use {' or '.join(NETWORKS)}")
    _, where = measured_device(config.device)
    for name in ("rounds", "repetitions", "prompt_tokens"):
        if config[name] < 1:
            raise ValueError(f"{name}={config[name]}: give at least 1")
    asked: Any = OmegaConf.to_container(config.shape)
    sizes = {field.name: asked[field.name] for field in dataclasses.fields(LlamaShape) if field.name in asked}
    shape = LlamaShape(**{"num_kv_heads": asked["num_heads"]} | sizes)
    dtype = as_dtype(config.dtype or ("bfloat16" if config.device == "cuda" else "float32"))
    size = config.draft_vocab_size
    if size is None and config.network == "fused":
        size = min(DRAFT_VOCABULARY, shape.vocab_size)
    if config.graphs and (config.compile or config.device != "cuda"):
        raise ValueError("graphs=true records CUDA graphs: it needs device=cuda, and compile=false")
    acceptance = list(config.acceptance) if isinstance(config.acceptance, ListConfig) else [config.acceptance]
    trees = trees_of(config)
    check_script(acceptance, trees, size or shape.vocab_size)
    room = room_for(acceptance, config.rounds, trees)
    if room >= (known := size or shape.vocab_size):
        raise ValueError(
            f"rounds={config.rounds}: a text of {room} tokens that differ is needed, and {known} can be drafted; give "
            "fewer rounds, or a larger draft_vocab_size"
        )
    out = None if config.out is None else writable(config.out)
    positions = config.prompt_tokens + room + max(tree.max_nodes for tree in trees.values()) + 1
    target = random_target(shape, positions=positions, dtype=dtype, device=config.device)
    drafter = random_drafter(target, NETWORKS[config.network], size)
    drawn = torch.randint(shape.vocab_size, (config.prompt_tokens,), generator=torch.Generator().manual_seed(0))
    prompt = [*drawn[1:].tolist(), 0]  # the text then counts from 1 on
    speed = measure_rounds(
        target,
        drafter,
        trees,
        prompt,
        acceptance,
        rounds=config.rounds,
        repetitions=config.repetitions,
        compile=config.compile,
        graphs=config.graphs,
    )
    if not speed.runs["plain"]:
        print("\ninterrupted before a repetition was finished", file=sys.stderr)
        raise SystemExit(130)
    speed.setting |= {
        "shape": dataclasses.asdict(shape),
        "network": config.network,
        "draft_vocab_size": size,
        "where": where,
        "torch": torch.__version__,
    }
    vocabulary = "" if size is None else f", draft vocabulary {size:,}"
    print(
        f"\ntarget of {shape.num_layers} layers, width {shape.hidden_size:,}, vocabulary {shape.vocab_size:,}; "
        f"{config.network} drafter{vocabulary}; random weights; {where}, torch {torch.__version__}"
    )
    print(rounds_table(speed))
    if out is not None:
        out.write_text(json.dumps(speed.to_dict(), indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {out}")
    if speed.interrupted:
        raise SystemExit(130)
    if not speed.exact:
        print("error: rounds did not give the text of plain decoding with the scripted acceptance", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
