"""The tree that the real drafter drafts through its slots, against one uncached forward per node."""

import pytest
import torch

from eaglelab.decoding import Chain, Engine, StaticTree
from eaglelab.drafters import DrafterConfig, FeatureDrafter, SlotDrafter
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import hf_greedy, tiny_llama

VOCAB = 61


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB))


@pytest.fixture(scope="module")
def drafter(target):
    torch.manual_seed(2)
    network = FeatureDrafter(DrafterConfig.from_target(target.text_config))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return SlotDrafter(network, target, ("final",))


def causal(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def naive_node(target, network, tokens, path):
    """log p of the child after `path`: all rows again, predicted features fed back one by one."""
    model = target.model
    with torch.no_grad():
        prefix = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
        states, advanced = prefix, list(tokens[1:])
        for token in [*path, None]:
            embedded = model.get_input_embeddings()(torch.tensor([advanced]))
            position = torch.arange(len(advanced))[None]
            output = network(states, embedded, position, causal)[:, -1:]
            if token is None:
                return model.lm_head(output[0, 0]).log_softmax(-1)
            states = torch.cat([states, output], dim=1)
            advanced.append(token)


@pytest.mark.parametrize("policy", [Chain(4), StaticTree()], ids=["chain", "static"])
def test_drafted_tokens_and_values_are_the_sequential_ones(target, drafter, policy, monkeypatch):
    drafted = []
    real = type(policy).draft

    def spy(self, *args):
        drafted.append(real(self, *args))
        return drafted[-1]

    monkeypatch.setattr(type(policy), "draft", spy)
    engine = Engine(target, drafter, policy)
    state = engine.start([[5, 9, 44, 2, 17]], max_new_tokens=20, stop_ids=set())
    for _ in range(3):
        tokens = list(state.requests[0].tokens)
        engine.round(state)
        tree = drafted[-1]
        nodes = {(): ((), 0.0)}  # ranks -> tokens, value
        for place, ranks in enumerate(policy.paths):
            path, value = nodes[ranks[:-1]]
            log_p = naive_node(target, drafter.network, tokens, path)
            token = log_p.argsort(descending=True)[ranks[-1]]
            nodes[ranks] = ((*path, int(token)), value + float(log_p[token]))
            assert tree.tokens_BN[0, place] == token
            assert float(tree.log_values_BN[0, place]) == pytest.approx(nodes[ranks][1], rel=2e-5, abs=2e-5)


@pytest.mark.parametrize("policy", [Chain(4), StaticTree()], ids=["chain", "static"])
def test_output_is_the_targets(target, drafter, policy):
    for prompt in ([3], [5, 9, 44, 2, 17], [60] * 12):
        result = Engine(target, drafter, policy).generate_one(prompt, max_new_tokens=25, stop_ids=set())
        assert result.tokens == hf_greedy(target.model, prompt, 25)
