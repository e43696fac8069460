"""Tiny random models of the families that the target wrapper is tried on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from eaglelab.target import FrozenTarget

VOCAB = 97
WINDOW = 6  # of the sliding families: shorter than every tested sequence

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TWO_KINDS = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_dropout": 0.5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**_TWO_KINDS, "query_pre_attn_scalar": 8}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**_TWO_KINDS, "query_pre_attn_scalar": 8}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"resid_pdrop": 0.5}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, _EXPERTS),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, {**_TWO_KINDS, **_EXPERTS}),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    ),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_positions": 128, "resid_pdrop": 0.5}),
}


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A fresh tiny model, random weights with visible interactions between tokens."""
    model_class, config_class, extra = FAMILIES[family]
    config = config_class(**{**_SHAPE, **extra, **changes})
    torch.manual_seed(seed)
    return model_class(config).eval()


@cache
def target_of(family: str) -> FrozenTarget:
    """One shared wrapped model per family; tests must not change it."""
    return FrozenTarget(build(family))
