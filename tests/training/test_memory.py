"""Memory from shapes against what a real step saves, and against the measured peak of the process."""

import dataclasses
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from eaglelab.data.batch import Batch
from eaglelab.data.rows import compile_rows
from eaglelab.drafters.attention import SeenKeys
from eaglelab.target.shape import TargetShape
from eaglelab.training.activations import Numerics, again, kept
from eaglelab.training.cost import Shape, _measure_peak, in_fresh_process, return_freed_blocks
from eaglelab.training.flops import Load
from eaglelab.training.memory import Memory, Placement, drafter_parameters, step_memory
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
    """Largest sum, over the passes, of the storages that are held for gradients when the backward begins: what autograd
    saves, what passes share, and the gradients that it has gathered.

    Weights, their copies in half precision, the target's own tensors and the attention mask do not count.
    """
    needed = module.needed(batch.rows)
    mask = (needed.rows.legal_BR.shape[1], batch.rows.legal_BR.shape[1])
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
                alive = [x for ref in found if (x := ref()) is not None and x.shape[-2:] != mask]
                alive += shared_tensors(one.loss, own)
                copies = [x for x in alive if x.dtype == torch.bfloat16 and tuple(sorted(x.shape)) in weights]
                storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
                for x in copies:
                    storages.pop(x.untyped_storage().data_ptr(), None)
                most = max(most, sum(size for place, size in storages.items() if place not in known))
                one.loss.backward()
                found.clear()
    return most


def shared_tensors(loss: torch.Tensor, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that other passes read, their gradients, and data that is read once more: nothing that autograd saves."""
    found, seen, todo = [], set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        read = getattr(node, "read", None)
        found += [] if read is None else [x.cell_contents for x in read.__closure__ if torch.is_tensor(x.cell_contents)]
        copies = [*getattr(node, "copies", []), *([node.variable] if hasattr(node, "variable") else [])]
        for copy in copies:
            if not any(copy is parameter for parameter in parameters):
                found += [copy] if copy.grad is None else [copy, copy.grad]
    return found


def load_of(batch: Batch, shape: Shape) -> Load:
    rows = batch.rows
    begins_BR = rows.supervised_BR & ~rows.supervised_BR.roll(1, 1)
    return Load(
        shape.batch,
        shape.length,
        rows.legal_BR.shape[1],
        batch.supervised,
        packed=not rows.causal,
        roots=int(rows.supervised_BR.sum(1).max()),
        reach=int(begins_BR.sum(1).max()),
    )


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
    seen = SeenKeys(batch.rows, module.needed(batch.rows).slot_BU)
    mask = seen.bias(torch.bfloat16 if mixed else torch.float32) if seen.masked else None
    assert ours.pop("mask") == (0 if mask is None else mask.nbytes)
    assert ours.total() == pytest.approx(saved_bytes(module, batch, mixed), rel=0.02)


MEBIBYTE = 2**20
SMALL_VOCABULARY = Shape(128, 512, num_layers=7, num_heads=4, vocab_size=512, batch=4, length=2048)
LARGE_VOCABULARY = Shape(256, 768, num_layers=7, num_heads=4, vocab_size=32768, batch=1, length=2048)
MEASURED = [
    ("eagle", {}),
    ("hass", {}),
    ("hass", {"detach": False}),
    ("eagle3", {}),
    ("eagle3", {"steps": 3, "draft_vocab_size": 512}),
    ("eagle3", {"checkpoint_steps": True}),
]


def planned(module: DraftingModule, shape: Shape, optim: OptimConfig) -> Memory:
    batch, target = shape.make_batch(), TargetShape.of_model(module.target.model)
    kinds = [dataclasses.replace(one, checkpointed=module.checkpoint_steps) for one in rollouts(module.contract)]
    return step_memory(target, module.drafter_config, kinds, load_of(batch, shape), optim, Numerics())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "shape", [Shape(), SMALL_VOCABULARY, LARGE_VOCABULARY], ids=["default", "small vocabulary", "large vocabulary"]
)
@pytest.mark.parametrize(("variant", "settings"), MEASURED, ids=lambda x: str(x))
def test_planned_peak_is_the_measured_one(variant: str, settings: dict[str, Any], shape: Shape):
    """Without what was resident before the step: weights and optimizer state."""
    settings = dict(settings)
    if "draft_vocab_size" in settings:
        settings["draft_vocab_size"] = shape.vocab_size // 4
    optim = OptimConfig(lr=1e-4)
    memory = planned(build(variant, dataclasses.replace(shape, batch=1, length=64), settings, optim), shape, optim)
    moving = memory.peak - memory.target - memory.drafter - memory.optimizer
    measured = in_fresh_process(_measure_peak, (variant, shape, settings, 1, 1), return_freed_blocks)
    assert moving / MEBIBYTE == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("variant", "settings"), cases())
def test_resident_bytes_are_those_of_the_tensors(variant: str, settings: dict[str, Any], optimizer: str):
    """Weights, rotary tables, gradients and optimizer state after a step."""
    optim = OptimConfig(lr=1e-3, name=optimizer)
    module, shape = build(variant, SHAPE, settings, optim), SHAPE
    stepper, _ = optim.build(module.network.named_parameters(), 1)
    for one in module.passes(View.of(shape.make_batch(), module.target, module.taps)):
        one.loss.backward()
    stepper.step()
    memory = planned(module, shape, optim)
    parameters = list(module.network.parameters())
    maps = {"d2t", "t2d"}  # a few bytes of a draft vocabulary, not counted
    tables = [x for name, x in module.network.named_buffers() if name not in maps]
    assert memory.drafter == sum(x.nbytes for x in [*parameters, *tables])
    assert memory.gradients == sum(x.grad.nbytes for x in parameters if x.grad is not None)
    state = [x for state in stepper.state.values() for x in state.values() if isinstance(x, torch.Tensor) and x.ndim]
    assert memory.optimizer == sum(x.nbytes for x in state)
    assert memory.target == sum(x.nbytes for x in module.target.model.parameters())
    assert drafter_parameters(module.drafter_config, rollouts(module.contract)[-1]) == sum(
        x.numel() for x in parameters
    )


@pytest.mark.parametrize("variant", ["hass", "eagle3"])
def test_a_spread_drafter_keeps_its_share_of_weights_and_state(variant: str):
    """tests/training/test_measures.py and test_zero.py hold the shares against those of real processes."""
    optim = OptimConfig(lr=1e-3)
    module = build(variant, SHAPE, {}, optim)
    target, load = TargetShape.of_model(module.target.model), load_of(SHAPE.make_batch(), SHAPE)
    arguments = (target, module.drafter_config, rollouts(module.contract), load, optim, Numerics())
    weights = sum(p.nbytes for p in module.network.parameters())
    alone, each = step_memory(*arguments), step_memory(*arguments, Placement(4))
    assert (alone.gradients, each.gradients) == (weights, 2 * weights)
    share = pytest.approx(weights / 4, abs=4)
    for drafter, gradients in (("sharded", 0), ("partitioned", share)):
        spread = step_memory(*arguments, Placement(4, drafter=drafter))
        assert spread.drafter - alone.drafter == share
        assert spread.gradients - alone.gradients == gradients
        assert spread.optimizer == pytest.approx(alone.optimizer / 4, abs=4)
        same = {"drafter": 0, "gradients": 0, "optimizer": 0}
        assert dataclasses.replace(spread, **same) == dataclasses.replace(alone, **same)
        assert step_memory(*arguments, Placement(1, drafter=drafter)) == alone


def test_checkpointed_steps_keep_state_and_keys_and_one_step_at_a_time():
    module = build("eagle3", SHAPE, {}, OptimConfig(lr=1e-3))
    (whole,) = rollouts(module.contract)
    checkpointed, load = dataclasses.replace(whole, checkpointed=True), load_of(SHAPE.make_batch(), SHAPE)
    numbers = (module.drafter_config, load, Numerics())
    saved = kept(numbers[0], checkpointed, *numbers[1:])
    assert saved["loss"] == kept(numbers[0], whole, *numbers[1:])["loss"]
    assert saved.total() < 0.6 * kept(numbers[0], whole, *numbers[1:]).total()
    assert again(numbers[0], whole, *numbers[1:]) == 0 < again(numbers[0], checkpointed, *numbers[1:])


def test_a_sharded_target_leaves_its_share_and_two_layers():
    module = build("hass", SHAPE, {}, OptimConfig(lr=1e-3))
    target, optim = TargetShape.of_model(module.target.model), OptimConfig(lr=1e-3)
    arguments = (target, module.drafter_config, rollouts(module.contract), load_of(SHAPE.make_batch(), SHAPE), optim)
    whole = step_memory(*arguments, Numerics(), Placement(4))
    shared = step_memory(*arguments, Numerics(), Placement(4, sharded=True))
    layers = target.num_layers * target.layer
    assert whole.target - shared.target == 4 * (layers - layers // 4 - 2 * target.layer)
    assert dataclasses.replace(shared, target=0) == dataclasses.replace(whole, target=0)
    stored = step_memory(*arguments, Numerics(), online=False)
    assert stored.target == 4 * (target.parameters - layers)  # the embedding, here the head too, and the last norm
    assert stored.target_pass == 0
