"""A tiny target with the bundled tokenizer, in a folder, so that trainings and cells take a moment."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eaglelab.assets import bundled_target
from eaglelab.comparison import Budget, Plan, recipes_for
from eaglelab.decoding import Sampling

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(bundled_target())
    config = LlamaConfig(
        **SHAPE,
        num_hidden_layers=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


EAGLE3 = ["variant=eagle3", "variant.taps=[0,1]"]
"""The tiny target has too few layers for the published taps."""


def settings(tiny: Path) -> list[str]:
    """Overrides that make a training small."""
    data = ["data.limit=40", "data.val_limit=2", "data.batch_size=2"]
    return ["target=hf", f"target.source={tiny}", "target.dtype=float32", *data]


@pytest.fixture
def plan(tiny, tmp_path):
    """make(**changes): a comparison of EAGLE and HASS, of four optimizer steps each and few short cells."""

    def make(variants=("eagle", "hass"), recipes=None, budget=("steps", 4), **changes):
        asked = {
            "out": tmp_path / "out",
            "recipes": recipes_for(variants, recipes or {}),
            "given": {},
            "train": settings(tiny),
            "budget": Budget(*budget),
            "seeds": [0],
            "suites": ["gsm8k"],
            "limit": 3,
            "turns": "all",
            "max_new_tokens": 6,
            "trees": {"chain": {"name": "chain", "depth": 2}},
            "temperatures": [0.0],
            "batches": [1],
            "sampling": Sampling(),
            "resamples": 200,
        }
        return Plan(**asked | changes)

    return make
