"""FLOPs from shapes against the library's own count of a real step."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from eaglelab.target.shape import TargetShape
from eaglelab.training.cost import Shape
from eaglelab.training.flops import Load, step_flops
from eaglelab.variants import VARIANTS, OptimConfig, View

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SHAPE = Shape(hidden_size=48, intermediate_size=112, num_layers=7, num_heads=3, vocab_size=320, batch=2, length=116)
WIDE = Shape(hidden_size=64, intermediate_size=96, num_layers=7, num_heads=2, vocab_size=900, batch=1, length=257)
VARIANT_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("hass", {}),
    ("hass", {"passes": 5}),
    ("hass", {"passes": 4, "detach": False}),
    ("eagle3", {}),
    ("eagle3", {"steps": 3, "draft_vocab_size": 200, "fc_norm": True}),
    ("eagle3", {"steps": 2, "train_head": False}),
    ("eagle3", {"steps": 2, "drafter": {"num_key_value_heads": 1}}),
]


class NoModules:
    """In place of the counter's module tracker, whose hooks do not stand ``autograd.grad`` inside a forward."""

    parents: ClassVar = {"Global"}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def counted(module, batch, optim: OptimConfig) -> float:
    """The library's count of target pass, rollout, backward and optimizer step."""
    optimizer, _ = optim.build(module.network.named_parameters(), 1)
    mapping = {
        FLASH: lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(q, k, v),
        FLASH_BACKWARD: lambda grad, q, k, v, *args, out_shape=None, **kwargs: sdpa_backward_flop_count(grad, q, k, v),
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    counter.mod_tracker = NoModules()
    with counter:
        for one in module.passes(View.of(batch, module.target, module.taps)):
            one.loss.backward()
        optimizer.step()
    return counter.get_total_flops()


def build(variant: str, shape: Shape, settings: dict[str, Any], optim: OptimConfig):
    counts = torch.arange(shape.vocab_size, 0, -1)
    return VARIANTS[variant](shape.target(), optim, answer_counts=lambda: counts, **settings)


def cases() -> Iterator[Any]:
    for variant, settings in VARIANT_SETTINGS:
        yield pytest.param(variant, settings, id="-".join([variant, *map(str, settings)]))


@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["batch", "long"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("variant", "settings"), cases())
def test_step_flops_are_those_of_a_real_step(variant, settings, optimizer, shape):
    optim = OptimConfig(lr=1e-3, name=optimizer)
    module, batch = build(variant, shape, settings, optim), shape.make_batch()
    roots = batch.supervised // shape.batch  # the last rows of each sequence
    load = Load(shape.batch, shape.length, batch.rows.legal_BR.shape[1], batch.supervised, roots=roots)
    ours = step_flops(TargetShape.of_model(module.target.model), module.drafter_config, module.contract, load, optim)
    assert ours.total == pytest.approx(counted(module, batch, optim), rel=0.01)
