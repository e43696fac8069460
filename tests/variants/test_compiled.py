"""`compiled=true`: the drafter's MLP through torch.compile, without its code generator, which takes a minute."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from eaglelab.drafters.layers import SwiGLU
from eaglelab.variants import Eagle3Module, EagleModule, HassModule, OptimConfig, View
from tests.variants.conftest import make_batch, tiny_target
from tests.variants.reference import assert_same_gradients

CASES = [
    (EagleModule, {}),
    (HassModule, {"passes": 3}),
    (Eagle3Module, {"steps": 3, "checkpoint_steps": True}),
]


@pytest.fixture
def captured(monkeypatch):
    """The graphs that were captured."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(SwiGLU, "compile", lambda self, **how: nn.Module.compile(self, backend=backend, **how))
    torch.compiler.reset()
    yield graphs
    torch.compiler.reset()


@pytest.fixture(scope="module")
def deep_target():
    return tiny_target(num_hidden_layers=7)


def losses_and_gradients(kind, target, settings):
    """Of two batches with rows of different lengths; the second is larger."""
    torch.manual_seed(0)
    module = kind(target, OptimConfig(lr=1e-3), **settings)
    losses = []
    for lengths in (((24, 19), (40,)), ((9, 7, 30), (12, 20), (33,))):
        for one in module.passes(View.of(make_batch(lengths), target, module.taps)):
            one.loss.backward()
            losses.append(float(one.loss.detach()))
    return losses, [p.grad for p in module.network.parameters()], list(module.network.state_dict())


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=["eagle", "hass", "eagle3"])
def test_loss_and_gradients_are_the_same(deep_target, captured, kind, settings):
    losses, gradients, names = losses_and_gradients(kind, deep_target, settings)
    assert not captured
    compiled = losses_and_gradients(kind, deep_target, settings | {"compiled": True})
    assert captured
    assert compiled[0] == pytest.approx(losses, rel=1e-6)
    assert_same_gradients(compiled[1], gradients)
    assert compiled[2] == names
