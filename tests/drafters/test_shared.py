"""Keys that passes share: the values of keys made the usual way, and the gradients of one graph over all passes."""

import pytest
import torch
from transformers import LlamaConfig

from eaglelab.drafters import DrafterConfig, FeatureDrafter, SharedKeys


def network(**settings) -> FeatureDrafter:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, vocab_size=11)
    return FeatureDrafter(DrafterConfig.from_target(config, **settings)).double()


def gradients(module: FeatureDrafter) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("fc_bias", [True, False])
def test_keys_of_data_are_the_keys(fc_bias):
    """Values and gradients of ``keys``, at positions that do not begin at 0."""
    ours, plain = network(fc_bias=fc_bias), network(fc_bias=fc_bias)
    state, embedding = torch.randn(2, 3, 7, 16, dtype=torch.float64).unbind(0)
    position = torch.randint(0, 40, (3, 7))
    found = ours.keys_of_data(lambda: torch.cat((embedding, state), -1), position, ours.key_maps())
    expected = plain.keys(state, embedding, position)
    torch.testing.assert_close(found, expected)
    weights = [torch.randn_like(x) for x in expected]
    for keys in (found, expected):
        sum((x * weight).sum() for x, weight in zip(keys, weights, strict=True)).backward()
    assert {"fc.weight", "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"} <= gradients(
        ours
    ).keys()
    torch.testing.assert_close(gradients(ours), gradients(plain))


def test_entering_is_fc():
    ours, plain = network(), network()
    state, embedding = torch.randn(2, 3, 7, 16, dtype=torch.float64).unbind(0)
    found, expected = ours.enter(lambda: torch.cat((embedding, state), -1)), plain.fc(torch.cat((embedding, state), -1))
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(gradients(ours), gradients(plain))


def readers() -> list:
    """Losses of three passes; the second one reads values alone."""
    return [
        lambda k, v: (k.sin() * v).sum(),
        lambda k, v: (3 * v.exp()).sum(),
        lambda k, v: (k * k * v).sum(),
    ]


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_gradients_of_separate_passes_are_those_of_one_graph(passes):
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    data = torch.randn(6, 5, dtype=torch.float64)

    def keys():
        k, v = (data @ weight).chunk(2, dim=-1)
        return k, v.tanh()

    shared = SharedKeys(keys())
    before = None
    for number, reader in enumerate(readers()[:passes], start=1):
        last = number == passes
        reader(*shared.read(last=last)).backward()
        if not last:
            assert weight.grad is before is None  # nothing reaches the weights before the last pass
    one_graph = sum(reader(*keys()) for reader in readers()[:passes])
    torch.testing.assert_close(weight.grad, torch.autograd.grad(one_graph, weight)[0])


def test_a_pass_that_reads_neither_leaves_the_others_gradient():
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    shared = SharedKeys((weight.sin(), weight.cos()))
    k, v = shared.read(last=False)
    (2 * k).sum().backward()
    k, v = shared.read(last=True)
    (k * 0 + v).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * weight.detach().cos() - weight.detach().sin())
