"""The feature drafter against the pinned implementation's numbers, and against decoding."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma3TextConfig, GPTNeoXConfig, LlamaConfig

from eaglelab.drafters import DrafterConfig, FeatureDrafter, RolloutContext
from eaglelab.objectives import distill, smooth_l1
from tests.oracles.golden import Golden


@pytest.mark.parametrize("case", ["eagle1_train_nopad_s0", "eagle1_train_pad_s0"])
def test_golden_training_case(case):
    """Losses and every gradient of the published EAGLE-1 step, from *unshifted* inputs."""
    golden = Golden(case)
    network = FeatureDrafter(golden.drafter_config())
    weights = golden.group("w.")
    embedding = weights.pop("embed_tokens.weight")
    network.load_state_dict(weights, strict=True)
    rows = golden.rows()

    tokens, features = golden["in.input_ids"], golden["in.features"]
    predicted = network(
        rows.gather(features),
        F.embedding(rows.gather(tokens, 1), embedding),
        rows.position_BR,
        RolloutContext(rows).native,
    )
    expected = rows.gather(golden["out.predict"])
    torch.testing.assert_close(predicted[rows.legal_BR], expected[rows.legal_BR], rtol=1e-5, atol=1e-6)
    predicted_Md = predicted.flatten(0, 1)[rows.supervised_M]
    teacher_Md = rows.gather(features, 1).flatten(0, 1)[rows.supervised_M]
    count = rows.num_supervised
    regression = smooth_l1(predicted_Md, teacher_Md) / count
    distilled = distill(predicted_Md, teacher_Md, lambda x: x @ golden["head.weight"].T, chunk=5)
    soft = distilled.loss / count
    loss = regression + 0.1 * soft
    assert regression.item() == pytest.approx(golden.facts["loss_reg"], rel=1e-5)
    assert soft.item() == pytest.approx(golden.facts["loss_cls"], rel=1e-5)
    assert loss.item() == pytest.approx(golden.facts["loss"], rel=1e-5)

    loss.backward()
    gradients = golden.group("grad.")
    assert gradients.keys() == dict(network.named_parameters()).keys()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6, msg=name)


def test_no_norm_before_attention_and_none_at_the_end():
    """With attention and MLP silenced the layer is the identity on the fusion output."""
    config = DrafterConfig.from_target(LlamaConfig(hidden_size=8, num_attention_heads=2, vocab_size=11))
    network = FeatureDrafter(config)
    with torch.no_grad():
        network.layers[0].self_attn.o_proj.weight.zero_()
        network.layers[0].mlp.down_proj.weight.zero_()
    state, embedding = torch.randn(2, 1, 3, 8).unbind(0)
    out = network(state, embedding, torch.arange(3)[None], lambda q, k, v: q)
    torch.testing.assert_close(out, network.fc(torch.cat([embedding, state], -1)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden": 3}, "unknown field 'hidden'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type='dynamic'"),
        ({"num_taps": 3}, "reads one tap"),
    ],
)
def test_config_errors(overrides, message):
    target = LlamaConfig(hidden_size=8, num_attention_heads=4, vocab_size=11)
    with pytest.raises(ValueError, match=message):
        FeatureDrafter(DrafterConfig.from_target(target, **overrides))


def test_rope_base_comes_from_the_target_everywhere():
    """A base of 500,000 must not silently become 10,000."""
    base = {"rope_type": "default", "rope_theta": 500_000.0}
    target = LlamaConfig(hidden_size=8, num_attention_heads=2, vocab_size=11, rope_parameters=base)
    network = FeatureDrafter(DrafterConfig.from_target(target))
    angle = 3 * 500_000.0 ** (-torch.arange(0, 4, 2) / 4)
    torch.testing.assert_close(network.rotary.cos_PD[3, :2], angle.cos())
    assert network.config.to_llama().rope_parameters["rope_theta"] == 500_000.0


def test_targets_that_rotate_a_part_of_each_head_leave_the_drafter_a_whole_rotation():
    """What is served is a Llama layer, which rotates all of a head; and windows have a base of their own."""
    part = GPTNeoXConfig(hidden_size=16, num_attention_heads=2, vocab_size=11)
    assert part.rope_parameters["partial_rotary_factor"] < 1
    network = FeatureDrafter(DrafterConfig.from_target(part))
    assert "partial_rotary_factor" not in network.config.rope_parameters
    cos, _ = network.rotary(torch.arange(3)[None])
    assert cos.shape[-1] == network.config.head_dim == 8
    layered = Gemma3TextConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, vocab_size=11)
    base = layered.rope_parameters["full_attention"]["rope_theta"]
    assert base != layered.rope_parameters["sliding_attention"]["rope_theta"]
    assert DrafterConfig.from_target(layered).rope_parameters["rope_theta"] == base
