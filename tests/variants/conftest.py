"""A tiny random target and random conversations as token ids: no tokenizer, no files."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from eaglelab.data.batch import Batch
from eaglelab.data.rows import compile_rows
from eaglelab.target import FrozenTarget
from eaglelab.variants import EagleModule, OptimConfig


def tiny_target(seed: int = 0, **overrides) -> FrozenTarget:
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # logits far from uniform
        "attention_dropout": 0.1,  # would show if the target ever left eval mode
    }
    return FrozenTarget(LlamaForCausalLM(LlamaConfig(**shape | overrides)))


def make_batch(lengths=((9, 7), (12,)), *, vocab=61, seed=0, answer_from=3) -> Batch:
    """Packed rows of random tokens; the first ``answer_from`` tokens of every segment are the prompt."""
    g = torch.Generator().manual_seed(seed)
    B, S = len(lengths), max(sum(x) for x in lengths) + 1
    valid = torch.zeros(B, S, dtype=torch.bool)
    segment = torch.full((B, S), -1)
    position = torch.zeros(B, S, dtype=torch.long)
    answer = torch.zeros(B, S, dtype=torch.bool)
    for b, row in enumerate(lengths):
        start = 0
        for i, n in enumerate(row):
            valid[b, start : start + n] = True
            segment[b, start : start + n] = i
            position[b, start : start + n] = torch.arange(n)
            answer[b, start + answer_from : start + n] = True
            start += n
    tokens = torch.randint(vocab, (B, S), generator=g) * valid
    rows = compile_rows(valid, segment, position, answer)
    return Batch(tokens, valid, segment, position, answer, rows)


def loader(batches: list[Batch]) -> DataLoader:
    return DataLoader(batches, batch_size=None)


def eagle(target, *, steps=10, **settings) -> EagleModule:
    torch.manual_seed(settings.get("seed", 0))
    optim = OptimConfig(**{"lr": 5e-3, "schedule": "constant", "total_steps": steps} | settings.pop("optim", {}))
    return EagleModule(target, optim, **settings)


@pytest.fixture(scope="session")
def target() -> FrozenTarget:
    return tiny_target()
