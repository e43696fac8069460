"""The shipped losses and gradients against the literal implementation, which shares nothing but networks and rows."""

import pytest
import torch

from eaglelab.training.cost import Shape
from eaglelab.training.literal import literal_loss
from eaglelab.variants import VARIANTS, OptimConfig, View
from tests.variants.conftest import make_batch, tiny_target
from tests.variants.reference import assert_same_gradients

SHAPE = Shape(hidden_size=32, intermediate_size=48, num_layers=7, num_heads=4, vocab_size=90, batch=2, length=40)
CASES = [
    ("eagle", {"noise": "paper_uniform"}),
    ("hass", {"passes": 3, "top_k": 5, "pass_weights": [1.0, 0.5, 2.0]}),
    ("hass", {"passes": 2, "noise": "paper_uniform", "drafter": {"num_key_value_heads": 2, "fc_bias": False}}),
    ("hass", {"passes": 5, "pass_weights": [1.0, 0.0, 2.0, 1.0, 0.0]}),
    ("hass", {"passes": 1}),
    ("eagle3", {}),
    ("eagle3", {"draft_vocab_size": 30, "steps": 4, "recurrence": "post_norm", "drafter": {"num_key_value_heads": 2}}),
]
IDS = ["eagle", "hass", "hass grouped", "hass five", "hass one", "eagle3", "eagle3 draft vocabulary"]


@pytest.mark.parametrize(("variant", "settings"), CASES, ids=IDS)
@pytest.mark.parametrize("skips_rows", [True, False], ids=["needed rows", "all rows"])
def test_losses_and_gradients_are_the_literal_ones(variant, settings, skips_rows):
    counts = torch.arange(90, 0, -1)
    torch.manual_seed(0)
    module = VARIANTS[variant](SHAPE.target(), OptimConfig(lr=1e-3), answer_counts=lambda: counts, **settings)
    module.skips_rows = skips_rows
    view = View.of(SHAPE.make_batch(), module.target, module.taps)
    total = 0.0
    for one in module.passes(view):
        one.loss.backward()
        total += float(one.loss.detach())
    ours = [p.grad.clone() for p in module.network.parameters()]
    module.zero_grad()
    loss = literal_loss(module, view)
    loss.backward()
    assert total == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_same_gradients(ours, [p.grad for p in module.network.parameters()])


def test_separate_passes_under_mixed_precision_err_no_more_than_the_literal_ones():
    """Gradients of both under bf16 autocast against those in fp32, as one vector each."""
    torch.manual_seed(0)
    module = VARIANTS["hass"](SHAPE.target(), OptimConfig(lr=1e-3))
    view = View.of(SHAPE.make_batch(), module.target, module.taps)

    def gradient(literal: bool, mixed: bool) -> torch.Tensor:
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            if literal:
                literal_loss(module, view).backward()
            else:
                for one in module.passes(view):
                    one.loss.backward()
        return torch.cat([p.grad.flatten() for p in module.network.parameters()])

    exact = gradient(literal=True, mixed=False)
    ours, literal = ((gradient(x, mixed=True) - exact).norm() / exact.norm() for x in (False, True))
    assert 0 < ours < 1.1 * literal < 0.05


def test_packed_rows_are_refused():
    target = tiny_target()
    module = VARIANTS["eagle"](target, OptimConfig(lr=1e-3))
    with pytest.raises(ValueError, match="one segment per sequence"):
        literal_loss(module, View.of(make_batch(), target, module.taps))
