"""The wrapper stays frozen, stays out of checkpoints, and refuses what it cannot serve."""

from __future__ import annotations

import pytest
import torch
from lightning import LightningModule
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from eaglelab.target import FrozenTarget
from tests.target.target_families import VOCAB, build, target_of


class Owner(LightningModule):
    def __init__(self, target: FrozenTarget) -> None:
        super().__init__()
        self.target = target
        self.drafter = nn.Linear(4, 4)


def test_it_stays_in_eval_mode_and_owns_nothing_trainable() -> None:
    target = FrozenTarget(build("phi3"))  # a family with dropout in its config
    owner = Owner(target).train()
    assert owner.drafter.training
    assert not any(module.training for module in target.modules())
    assert {name for name, p in owner.named_parameters() if p.requires_grad} == {
        "drafter.weight",
        "drafter.bias",
    }
    target.assert_frozen()
    ids = torch.ones(1, 6, dtype=torch.long)
    first, second = (target.features(ids, ("final",))["final"] for _ in range(2))
    assert torch.equal(first, second)


def test_assert_frozen_names_the_culprit() -> None:
    target = FrozenTarget(build("llama"))
    target.model.model.layers[1].train()
    with pytest.raises(AssertionError, match=r"module model\.model\.layers\.1"):
        target.assert_frozen()
    target.train()
    weight = target.model.model.norm.weight
    weight.requires_grad_(True)
    with pytest.raises(AssertionError, match=r"model\.model\.norm\.weight requires a gradient"):
        target.assert_frozen()
    weight.requires_grad_(False)
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(AssertionError, match=r"model\.model\.norm\.weight has a gradient"):
        target.assert_frozen()


def test_checkpoints_do_not_carry_the_target() -> None:
    owner = Owner(target_of("llama"))
    state = owner.state_dict()
    assert set(state) == {"drafter.weight", "drafter.bias"}
    assert not target_of("llama").state_dict()
    result = owner.load_state_dict(state, strict=True)
    assert not result.missing_keys
    with pytest.raises(RuntimeError, match=r"drafter\.bias"):
        owner.load_state_dict({"drafter.weight": state["drafter.weight"]}, strict=True)


def test_what_it_says_about_itself() -> None:
    target = target_of("llama")
    assert (target.hidden_size, target.vocab_size, target.num_layers) == (32, VOCAB, 3)
    assert target.max_positions == 128
    assert target.dtype == torch.float32
    assert target.device.type == "cpu"
    assert target.eos_token_ids == {2}
    assert target.head_weight.shape == (VOCAB, 32)
    assert target.source == "memory"


def test_every_end_token_counts() -> None:
    model = build("llama", eos_token_id=[2, 5])
    model.generation_config.eos_token_id = [5, 7]
    assert FrozenTarget(model).eos_token_ids == {2, 5, 7}


def test_tied_head_is_the_embedding() -> None:
    target = target_of("qwen2")
    assert target.head_weight is target.model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("family", "linear"),
    [("llama", True), ("gemma3", True), ("gemma2", False), ("granite", False), ("cohere", False)],
)
def test_linear_heads_are_known_as_such(family: str, linear: bool) -> None:
    target = target_of(family)
    assert target.head_logits_are_linear is linear
    hidden = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(target.lm_head(hidden), hidden @ target.head_weight.T, atol=1e-6) is linear


def test_long_rope_serves_up_to_its_original_length() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    }
    model = build("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    target = FrozenTarget(model)
    assert target.max_positions == 16
    with pytest.raises(ValueError, match="context of 16"):
        target.features(torch.ones(1, 17, dtype=torch.long), ("final",))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_heads_and_features(dtype: torch.dtype) -> None:
    target = FrozenTarget(build("llama").to(dtype))
    feature = target.features(torch.ones(1, 4, dtype=torch.long), ("final",))["final"]
    assert feature.dtype == dtype
    assert target.lm_head(feature.float()).dtype == dtype


def bert() -> nn.Module:
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    return BertLMHeadModel(config).eval()


def bloom() -> nn.Module:
    return BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2)).eval()


def mamba() -> nn.Module:
    return MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)).eval()


def hybrid() -> nn.Module:
    config = Qwen3NextConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"],
    )
    return Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (bert, "no list of|no causal language model|stream"),
        (bloom, "no position ids"),
        (mamba, "no position ids"),
        (hybrid, "'linear_attention' keep a state"),
    ],
)
def test_models_that_cannot_be_targets_are_refused_with_the_reason(make, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FrozenTarget(make())


def test_nan_weights_are_named() -> None:
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        FrozenTarget(model)


def test_a_head_with_an_unknown_step_is_refused() -> None:
    class Twisted(type(build("llama"))):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.sin()
            return output

    model = build("llama")
    model.__class__ = Twisted
    with pytest.raises(ValueError, match="unknown step"):
        FrozenTarget(model)


def test_an_embedding_with_an_unknown_step_is_refused() -> None:
    model = build("llama")
    model.model.embed_tokens.register_forward_hook(lambda m, a, out: out)
    model.model.layers[0].register_forward_pre_hook(lambda m, args: (args[0] ** 3, *args[1:]))
    with pytest.raises(ValueError, match="multiple of the token embedding"):
        FrozenTarget(model)


def test_a_target_that_ignores_its_mask_gets_no_cache() -> None:
    model = build("llama")
    model.model.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    target = FrozenTarget(model)
    with pytest.raises(ValueError, match="cannot verify draft trees"):
        target.new_cache(1, 8)
