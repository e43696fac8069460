"""The fused drafter's two norms of EAGLE-3.1, against their definitions."""

import pytest
import torch
from transformers import LlamaConfig

from eaglelab.drafters import DrafterConfig, FeatureDrafter, FusedDrafter
from eaglelab.drafters.config import Recurrence

TARGET = LlamaConfig(hidden_size=8, num_attention_heads=2, num_key_value_heads=2, vocab_size=11, rms_norm_eps=1e-6)


def drafter(**overrides) -> FusedDrafter:
    torch.manual_seed(0)
    network = FusedDrafter(DrafterConfig.from_target(TARGET, **{"num_taps": 3, "fc_bias": False} | overrides))
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "norm" in name:
                weight.copy_(0.5 + torch.rand(weight.shape))
    return network


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def run(network, state):
    embedding = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1))
    return network(state, embedding, torch.arange(3)[None], lambda q, k, v: v)


def test_fc_norm_norms_each_stream_by_itself():
    """fc of [norm_0(x_0); norm_1(x_1); norm_2(x_2)]: not one norm over 3d, and a stream's scale does not matter."""
    network = drafter(fc_norm=True)
    streams = [torch.randn(1, 3, 8) * scale for scale in (1.0, 30.0, 1000.0)]
    normed = [rms_norm(x, network.fc_norm[i].weight) for i, x in enumerate(streams)]
    fused = network.fuse(torch.cat(streams, -1))
    torch.testing.assert_close(fused, torch.cat(normed, -1) @ network.fc.weight.T)
    streams[1] = streams[1] * 7
    torch.testing.assert_close(network.fuse(torch.cat(streams, -1)), fused, rtol=1e-4, atol=1e-5)


def test_a_normed_state_recurs_and_is_not_normed_again():
    """Same weights, same input: the post-norm state is the norm of the pre-norm one, and both give the same logits."""
    pre, post = drafter(), drafter(recurrence="post_norm")
    state = torch.randn(1, 3, 8)
    before, after = run(pre, state), run(post, state)
    torch.testing.assert_close(after, rms_norm(before, pre.norm.weight))
    torch.testing.assert_close(post.logits(after, None), pre.logits(before, None))
    torch.testing.assert_close(post.head_input(after), after, rtol=0, atol=0)
    assert not run(post, after).allclose(run(pre, before), rtol=1e-2)  # the second step differs


def test_tensor_names_are_those_of_the_published_checkpoints():
    """Off: exactly EAGLE-3's tensors. On: one weight per stream more; the recurrence adds none."""
    plain = drafter().state_dict().keys()
    assert drafter(recurrence="post_norm").state_dict().keys() == plain
    assert drafter(fc_norm=True).state_dict().keys() - plain == {f"fc_norm.{i}.weight" for i in range(3)}
    assert len(drafter(fc_norm=True, num_taps=5).fc_norm) == 5


def test_config_travels_and_old_ones_still_load():
    config = drafter(fc_norm=True, recurrence="post_norm").config
    assert DrafterConfig(**config.to_dict()) == config
    old = {k: v for k, v in drafter().config.to_dict().items() if k not in ("fc_norm", "recurrence")}
    assert DrafterConfig(**old) == drafter().config


@pytest.mark.parametrize("switch", [{"fc_norm": True}, {"recurrence": "post_norm"}])
def test_feature_drafters_have_neither(switch):
    with pytest.raises(ValueError, match="belong to variant=eagle3"):
        FeatureDrafter(DrafterConfig.from_target(TARGET, **switch))


def test_unknown_recurrence():
    assert set(Recurrence.__args__) == {"pre_norm", "post_norm"}
    with pytest.raises(ValueError, match="recurrence='both' is not one of pre_norm, post_norm"):
        drafter(recurrence="both")
