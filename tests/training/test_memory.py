"""Memory from shapes against what a real step saves, and against the measured peak of the process."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from eaglelab.data.batch import Batch
from eaglelab.data.rows import compile_rows
from eaglelab.drafters import RolloutContext
from eaglelab.training.activations import Numerics, kept
from eaglelab.training.cost import Shape
from eaglelab.training.flops import Load
from eaglelab.variants import DraftingModule, OptimConfig, View
from eaglelab.variants.rollout import rollouts
from tests.training.test_flops import SHAPE, WIDE, build, cases

GROUPED = Shape(hidden_size=40, intermediate_size=200, num_layers=7, num_heads=5, vocab_size=150, batch=3, length=64)


def packed_batch(shape: Shape) -> Batch:
    """Two segments and a little padding per sequence."""
    batch, S = shape.make_batch(), shape.length
    index_BS = torch.arange(S).expand(shape.batch, S)
    segment_BS = torch.where(index_BS < S - 3, (index_BS >= S // 3).long(), -1)
    valid_BS, position_BS = segment_BS >= 0, torch.where(index_BS >= S // 3, index_BS - S // 3, index_BS)
    answer_BS = valid_BS & (position_BS > 4)
    rows = compile_rows(valid_BS, segment_BS, position_BS, answer_BS)
    return Batch(batch.tokens_BS, valid_BS, segment_BS, position_BS, answer_BS, rows)


def saved_bytes(module: DraftingModule, batch: Batch, mixed: bool) -> int:
    """Largest sum, over the passes, of the storages that autograd holds when the backward begins.

    Weights, their copies in half precision, the target's own tensors and the attention mask do not count.
    """
    R = batch.rows.legal_BR.shape[1]
    with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
        view = View.of(batch, module.target, module.taps)
        own = [*module.network.parameters(), *module.network.buffers(), *module.target.model.parameters()]
        known = {x.untyped_storage().data_ptr() for x in [*own, view.taps_BRF, view.teacher_BSw]}
        weights = {tuple(sorted(p.shape)) for p in own if p.ndim == 2}
        most, found = 0, []

        def pack(x):
            found.append(weakref.ref(x))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            for one in module.passes(view):
                alive = [x for ref in found if (x := ref()) is not None and x.shape[-2:] != (R, R)]
                copies = [x for x in alive if x.dtype == torch.bfloat16 and tuple(sorted(x.shape)) in weights]
                storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
                for x in copies:
                    storages.pop(x.untyped_storage().data_ptr(), None)
                most = max(most, sum(size for place, size in storages.items() if place not in known))
                one.loss.backward()
                found.clear()
    return most


def load_of(batch: Batch, shape: Shape) -> Load:
    rows = batch.rows
    return Load(shape.batch, shape.length, rows.legal_BR.shape[1], batch.supervised, packed=not rows.causal)


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("shape", [SHAPE, WIDE, GROUPED], ids=["batch", "long", "wide mlp"])
@pytest.mark.parametrize(("variant", "settings"), cases())
def test_kept_bytes_are_those_that_autograd_saves(variant: str, settings: dict[str, Any], shape, layout, mixed):
    settings = dict(settings)
    if settings.get("draft_vocab_size", 0) > shape.vocab_size:
        settings["draft_vocab_size"] = shape.vocab_size // 2
    module = build(variant, shape, settings, OptimConfig(lr=1e-3))
    batch = shape.make_batch() if layout == "plain" else packed_batch(shape)
    rollout = rollouts(module.contract)[-1]
    numerics = Numerics(activation=2 if mixed else 4, target=4)
    ours = kept(module.drafter_config, rollout, load_of(batch, shape), numerics)
    mask = RolloutContext(batch.rows)._mask(torch.bfloat16 if mixed else torch.float32)
    assert ours.pop("mask") == (0 if mask is None else mask.nbytes)
    assert ours.total() == pytest.approx(saved_bytes(module, batch, mixed), rel=0.02)
