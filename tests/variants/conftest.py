"""A tiny random target and random conversations as token ids: no tokenizer, no files."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from eaglelab.data.batch import Batch
from eaglelab.data.rows import compile_rows
from eaglelab.target import FrozenTarget
from eaglelab.variants import EagleModule, OptimConfig
from tests.oracles.layout import packed


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
    valid, segment, position = packed(lengths, max(sum(x) for x in lengths) + 1)
    answer = valid & (position >= answer_from)
    tokens = torch.randint(vocab, valid.shape, generator=g) * valid
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
