"""Every family of targets decodes exactly, windows and experts included, in ragged batches and with trees."""

import os

import pytest
import torch

from eaglelab.decoding import DynamicTree, Engine, Sampling, StaticTree
from eaglelab.drafters import DrafterConfig, FeatureDrafter, FusedDrafter, SlotDrafter
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import ScriptDrafter, full_logits, hf_greedy, noise
from tests.target.target_families import FAMILIES, VOCAB, target_of

PROMPTS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 21, 1, 12)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_sampled_text_is_that_of_plain_decoding(family):
    """Long enough for trees to hang over a sliding window's edge."""
    target = target_of(family)
    exact, random = full_logits(target.model), noise(VOCAB)

    def predict(context):
        return exact(context) + 0.5 * exact(context).std() * random(context)

    plain = [hf_greedy(target.model, prompt, 24, [2]) for prompt in PROMPTS]
    for policy in (DynamicTree(width=3, depth=4, budget=9), StaticTree()):
        drafter = ScriptDrafter(predict, [prompt[0] for prompt in PROMPTS])
        results = Engine(target, drafter, policy).generate(PROMPTS, max_new_tokens=24, stop_ids={2}, batch=3)
        assert [result.tokens for result in results] == plain
        assert max(max(result.accepted) for result in results) >= 2, "the trees must be used"
    one = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2)
    drawn = Engine(target).generate(PROMPTS, max_new_tokens=16, stop_ids={2}, sampling=one)
    drafter = ScriptDrafter(predict, [prompt[0] for prompt in PROMPTS])
    drafted = Engine(target, drafter, StaticTree()).generate(PROMPTS, max_new_tokens=16, stop_ids={2}, sampling=one)
    assert [result.tokens for result in drafted] == [result.tokens for result in drawn]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_mixtures_experts_are_in_the_records(family):
    """The union over a tree's rows is at least the root's and at most what all experts allow."""
    target = target_of(family)
    drafter = ScriptDrafter(full_logits(target.model), [prompt[0] for prompt in PROMPTS])
    engine = Engine(target, drafter, StaticTree(), record_nodes=True)
    results = engine.generate(PROMPTS, max_new_tokens=12, stop_ids={2}, batch=2)
    layers = target.num_layers
    for record in (record for result in results for record in result.rounds):
        assert len(record.nodes.experts_union) == len(record.nodes.experts_root) == layers
        for union, root in zip(record.nodes.experts_union, record.nodes.experts_root, strict=True):
            assert root == target.text_config.num_experts_per_tok
            assert root <= union <= target.text_config.num_local_experts
        if record.drafted == 0:
            assert record.nodes.experts_union == record.nodes.experts_root
    assert any(
        union > root
        for result in results
        for record in result.rounds
        for union, root in zip(record.nodes.experts_union, record.nodes.experts_root, strict=True)
    )


@pytest.mark.slow
@pytest.mark.skipif("EAGLELAB_SMOLLM2" not in os.environ, reason="EAGLELAB_SMOLLM2 names no SmolLM2-135M .gguf file")
@pytest.mark.parametrize("network", [FeatureDrafter, FusedDrafter])
def test_smollm2_decodes_exactly_with_a_random_drafter(network):
    target = FrozenTarget.load(os.environ["EAGLELAB_SMOLLM2"])
    taps = ("final",) if network is FeatureDrafter else (2, target.num_layers // 2, target.num_layers - 3)
    torch.manual_seed(0)
    drafter = SlotDrafter(network(DrafterConfig.from_target(target.text_config, num_taps=len(taps))), target, taps)
    encoded = [target.tokenizer(text).input_ids for text in ("The capital of France is", "def add(a, b):", "1 2 3 4")]
    results = Engine(target, drafter, DynamicTree()).generate(encoded, max_new_tokens=24, stop_ids={2})
    assert [r.tokens for r in results] == [hf_greedy(target.model, prompt, 24) for prompt in encoded]
