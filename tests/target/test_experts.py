"""Experts touched by a tree, against the routers' logits of each path decoded alone as plain text."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from eaglelab.target import ExpertWatch, FrozenTarget
from tests.target.target_families import _SHAPE, VOCAB, build

EXPERTS, TOP_K = 8, 2
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_NUMBERED = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,  # layer 0 is dense
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 128,
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K, "hidden_size": 32},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
}
MORE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, {**_NUMBERED, "shared_expert_intermediate_size": 16}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, _NUMBERED),
    "granite_moe": (GraniteMoeForCausalLM, GraniteMoeConfig, _LOCAL),
    "deepseek_v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {**_DEEPSEEK, "topk_method": "greedy"}),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**_DEEPSEEK, "n_group": 4, "topk_group": 2}),
}
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", *MORE]
families = pytest.mark.parametrize("family", FAMILIES)


def model_of(family: str) -> nn.Module:
    if family in MORE:
        model_class, config_class, extra = MORE[family]
        torch.manual_seed(0)
        model = model_class(config_class(**{**_SHAPE, **extra})).eval()
    else:
        model = build(family, **(_NUMBERED if family == "qwen3_moe" else _LOCAL))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    return model


@pytest.fixture(scope="module")
def target_of() -> Any:
    targets: dict[str, FrozenTarget] = {}

    def get(family: str) -> FrozenTarget:
        if family not in targets:
            targets[family] = FrozenTarget(model_of(family))
        return targets[family]

    return get


def choose(family: str, model: nn.Module, layer: int, logits_E: torch.Tensor) -> set[int]:
    """The experts of one row, spelled out from its router logits."""
    order = sorted(range(EXPERTS), key=lambda e: -float(logits_E[e]))
    if family != "deepseek_v3":
        return set(order[:TOP_K])
    bias_E = model.model.layers[layer].mlp.gate.e_score_correction_bias
    score = [float(torch.sigmoid(logits_E[e])) + float(bias_E[e]) for e in range(EXPERTS)]
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    best = sorted(groups, key=lambda group: -sum(score[e] for e in group))[:2]
    return set(sorted((e for group in best for e in group), key=lambda e: -score[e])[:TOP_K])


def router_logits(target: FrozenTarget, text: list[int]) -> list[torch.Tensor]:
    """Every router's logits, by mixture layer: what the library hands out, or, where this family's class of an older
    release hands out none, what its routers return."""
    returned: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        returned.extend(value for value in output if value.shape[-1] == EXPERTS and value.is_floating_point())

    with ExitStack() as hooks:
        for name, module in target.model.named_modules():
            if name.endswith((".gate", ".router")):
                hooks.enter_context(module.register_forward_hook(keep))
        output = target.model(input_ids=torch.tensor([text]), output_router_logits=True, use_cache=False)
    handed_out = getattr(output, "router_logits", None)
    return returned if handed_out is None else list(handed_out)


def experts_alone(family: str, target: FrozenTarget, text: list[int]) -> dict[int, set[int]]:
    """Experts of the last token of a text, by decoder layer, from its router logits."""
    logits = router_logits(target, text)
    first = target.num_layers - len(logits)
    return {
        first + place: choose(family, target.model, first + place, logits_TE.reshape(len(text), -1)[-1])
        for place, logits_TE in enumerate(logits)
    }


PROMPTS = [[3, 14, 15, 92, 6], [5, 35, 89, 79], [32, 38, 46, 26, 43, 38]]
PARENTS = [-1, 0, 0, 1, 1, 2]  # of a tree's rows; row 0 is the root
COUNTS = [6, 4, 1]  # real rows of each sequence


def paths() -> list[list[int]]:
    found: list[list[int]] = []
    for row, parent in enumerate(PARENTS):
        found.append([*(found[parent] if parent >= 0 else []), row])
    return found


def forward(target: FrozenTarget, tokens_BN: torch.Tensor, count_B: list[int] | None, order: list[int]) -> None:
    """Prefill the prompts and run the trees, rows in the given order."""
    B, width = len(PROMPTS), max(map(len, PROMPTS))
    cache = target.new_cache(B, 32)
    prompt_BN = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in PROMPTS])
    lengths = [len(prompt) for prompt in PROMPTS]
    target.forward_rows(prompt_BN, None, cache, count_B=lengths, logits="last")
    cache.commit(None, lengths)
    depth_N = torch.tensor([len(path) - 1 for path in paths()])
    ancestor_NN = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for row, path in enumerate(paths()):
        ancestor_NN[row, path] = True
    target.forward_rows(
        tokens_BN[:, order],
        torch.tensor(lengths)[:, None] + depth_N[order],
        cache,
        ancestor_BNN=ancestor_NN[order][:, order].expand(B, -1, -1),
        count_B=count_B,
    )


def trees() -> torch.Tensor:
    return torch.randint(0, VOCAB, (len(PROMPTS), len(PARENTS)), generator=torch.Generator().manual_seed(1))


@families
def test_union_is_that_of_every_path_decoded_alone(family: str, target_of: Any) -> None:
    target, tokens_BN = target_of(family), trees()
    with ExpertWatch(target) as watch:
        forward(target, tokens_BN, COUNTS, list(range(len(PARENTS))))
        seen = watch.union(torch.arange(len(PARENTS)) < torch.tensor(COUNTS)[:, None])
    assert seen is not None
    assert set(seen.experts) == {EXPERTS}
    for b, (prompt, count) in enumerate(zip(PROMPTS, COUNTS, strict=True)):
        alone = [experts_alone(family, target, [*prompt, *tokens_BN[b, path].tolist()]) for path in paths()[:count]]
        assert seen.layers == tuple(alone[0])
        for place, layer in enumerate(seen.layers):
            assert int(seen.union_BL[b, place]) == len(set.union(*(row[layer] for row in alone)))
            assert int(seen.root_BL[b, place]) == len(alone[0][layer]) == TOP_K
    assert int(seen.union_BL[0].max()) > TOP_K
    assert seen.union_BL[2].tolist() == seen.root_BL[2].tolist()  # a root without a tree
    assert seen.to_host() == (seen.union_BL.tolist(), seen.root_BL.tolist())


@families
def test_row_order_and_padding_do_not_matter(family: str, target_of: Any) -> None:
    target, tokens_BN = target_of(family), trees()
    unions = []
    with ExpertWatch(target) as watch:
        for order in ([0, 1, 2, 3, 4, 5], [0, 2, 5, 1, 4, 3]):
            forward(target, tokens_BN, None, order)
            unions.append(watch.union())
        other_BN = tokens_BN.clone()
        other_BN[1, 4:] = 0
        other_BN[2, 1:] = 0
        for tokens in (tokens_BN, other_BN):
            forward(target, tokens, COUNTS, list(range(len(PARENTS))))
            unions.append(watch.union(torch.arange(len(PARENTS)) < torch.tensor(COUNTS)[:, None]))
    assert torch.equal(unions[0].union_BL, unions[1].union_BL)
    assert torch.equal(unions[0].root_BL, unions[1].root_BL)
    assert torch.equal(unions[2].union_BL, unions[3].union_BL)
    assert torch.equal(unions[0].union_BL[0], unions[2].union_BL[0])
    assert bool((unions[2].union_BL <= unions[0].union_BL).all())


def test_a_sequence_without_rows_touches_nothing(target_of: Any) -> None:
    target = target_of("mixtral")
    real_BN = torch.ones(3, 6, dtype=torch.bool)
    real_BN[1] = False
    with ExpertWatch(target) as watch:
        forward(target, trees(), None, list(range(6)))
        seen = watch.union(real_BN)
    assert seen.union_BL[1].tolist() == seen.root_BL[1].tolist() == [0, 0, 0]
    assert int(seen.union_BL[0].min()) >= TOP_K


def hooks_of(target: FrozenTarget) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


def test_no_hook_stays_behind(target_of: Any) -> None:
    target = target_of("qwen3_moe")
    before = hooks_of(target)
    watch = ExpertWatch(target)
    cache = target.new_cache(1, 2)
    for _ in range(2):  # it may be entered again
        with watch:
            assert hooks_of(target) > before
        assert hooks_of(target) == before
        with pytest.raises(ValueError, match="KV slots are full"), watch:
            target.forward_rows(torch.arange(3)[None], None, cache)
        assert hooks_of(target) == before


def test_it_may_be_asked_after_leaving_but_not_about_a_pass_that_broke(target_of: Any) -> None:
    target = target_of("mixtral")
    watch = ExpertWatch(target)
    with watch:
        target.features(torch.tensor([[1]]), ("final",))
    assert watch.union().union_BL.tolist() == [[TOP_K] * 3]

    def broken() -> None:
        with watch:
            target.features(torch.tensor([[1]]), ("final",))
            raise RuntimeError

    for leave in (broken, lambda: watch.__enter__().__exit__(None)):
        with pytest.raises(RuntimeError) if leave is broken else nullcontext():
            leave()
        with pytest.raises(ValueError, match="no forward pass"):
            watch.union()


def test_entering_twice_is_a_mistake(target_of: Any) -> None:
    target = target_of("mixtral")
    before, watch = hooks_of(target), ExpertWatch(target)
    with pytest.raises(AssertionError, match="already"), watch, watch:
        pass
    assert hooks_of(target) == before


def test_only_the_latest_pass_counts_and_only_once(target_of: Any) -> None:
    target = target_of("mixtral")
    cache = target.new_cache(1, 32)
    with ExpertWatch(target) as watch:
        with pytest.raises(ValueError, match="no forward pass"):
            watch.union()
        target.forward_rows(torch.arange(20)[None], None, cache)
        cache.commit(None, [20])
        target.forward_rows(torch.tensor([[7]]), None, cache)
        with torch.inference_mode():
            assert watch.union().union_BL.tolist() == [[TOP_K] * 3]
        with pytest.raises(ValueError, match="no forward pass"):
            watch.union()
        cache.discard()
        target.forward_rows(torch.tensor([[7, 8]]), None, cache)
        with pytest.raises(ValueError, match=r"real_BN has shape \(1, 3\)"):
            watch.union(torch.ones(1, 3, dtype=torch.bool))


def test_dense_targets_are_left_alone() -> None:
    target = FrozenTarget(build("llama"))
    assert not ExpertWatch.supported(target)
    before = hooks_of(target)
    with ExpertWatch(target) as watch:
        assert hooks_of(target) == before
        target.features(torch.tensor([[1, 2, 3]]), ("final",))
        assert watch.union() is None


@families
def test_supported(family: str, target_of: Any) -> None:
    assert ExpertWatch.supported(target_of(family))


def test_a_block_that_chooses_by_itself_shows_it_to_its_experts() -> None:
    """DBRX: the router returns logits alone."""
    target = FrozenTarget(DbrxForCausalLM(DbrxConfig(**_DBRX)).eval())
    routed: list[torch.Tensor] = []
    for module in target.modules():
        if type(module).__name__ == "DbrxRouter":
            module.register_forward_hook(lambda module, args, output: routed.append(output))
    with ExpertWatch(target) as watch:
        target.features(torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]), ("final",))
        seen = watch.union()
    assert seen.layers == (0, 1)
    for place, logits in enumerate(routed):
        top_BNk = logits.reshape(2, 5, EXPERTS).topk(TOP_K).indices
        assert seen.union_BL[:, place].tolist() == [len(set(rows.flatten().tolist())) for rows in top_BNk]


def test_families_without_a_router_beside_the_experts_are_not_supported() -> None:
    target = FrozenTarget(JetMoeForCausalLM(JetMoeConfig(**{**_SHAPE, **_LOCAL, "kv_channels": 8})).eval())
    assert not ExpertWatch.supported(target)


def test_silent_routers_and_uncounted_experts_are_refused(target_of: Any) -> None:
    target = FrozenTarget(build("mixtral"))
    block = target._wiring.layers[1].mlp
    block.forward = lambda hidden: hidden  # as a fused kernel would
    with ExpertWatch(target) as watch:
        target.features(torch.tensor([[1, 2, 3]]), ("final",))
        with pytest.raises(ValueError, match=r"layers \[1\] did not show .*MixtralTopKRouter"):
            watch.union()
    del block.gate.num_experts, block.experts.num_experts
    with pytest.raises(ValueError, match="does not say how many experts"):
        ExpertWatch(target)


def test_indices_past_the_experts_stand_for_none() -> None:
    """Identity experts (LongCat) and other devices' experts carry no weights here."""
    target = FrozenTarget(build("mixtral"))
    for module in target.modules():
        if type(module).__name__ == "MixtralExperts":
            module.num_experts = 1  # experts 1 to 3 now lie past the end
            module.forward = lambda hidden, index, weights: hidden
    with ExpertWatch(target) as watch:
        target.features(torch.arange(40)[None], ("final",))
        seen = watch.union()
    assert seen.union_BL.tolist() == [[1, 1, 1]]
