"""Training on a device that is not the host: the same numbers, every tensor in its place, and nobody waits.

Batches of several lengths and segments run through a whole Lightning fit with validation. The loop is the product's;
the device is pretended.
"""

import dataclasses

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from eaglelab.data.loader import looking_ahead
from eaglelab.features.ahead import FeaturesAhead
from eaglelab.features.source import OnlineFeatures
from eaglelab.target import FINAL, unpacking
from eaglelab.variants import VARIANTS, OptimConfig
from tests.devices import pretended
from tests.variants.conftest import loader, make_batch, tiny_target
from tests.variants.test_eagle import trainer

PACKED = ((9, 7), (12,))
SINGLE = ((14,), (9,))
SETTINGS = {"eagle": {"noise": "length_scaled"}, "hass": {}, "eagle3": {"draft_vocab_size": 40}}


class Waits(L.Callback):
    """What each training step waited for, and its loss."""

    def __init__(self):
        self.losses, self.steps = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        assert batch.tokens_BS.device == module.device

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(list(pretended.waits))
        self.losses.append(float(trainer.callback_metrics.get("train/loss", torch.nan)))
        pretended.waits.clear()


def fitted(name, where, batches, *, accumulate=1, **settings):
    """A trained module, its waits and its simulated tau."""
    target = tiny_target(num_hidden_layers=8)
    torch.manual_seed(1)
    counts = torch.arange(61)
    optim = OptimConfig(lr=1e-3, accumulate=accumulate, clip_norm=0.5)
    module = VARIANTS[name](target, optim, answer_counts=lambda: counts, **SETTINGS[name] | settings)
    waits = Waits()
    fit = trainer(
        -1,
        strategy=SingleDeviceStrategy(device=where),
        accelerator="cpu" if where.type == "cpu" else pretended.accelerator(),
        max_epochs=1,
        callbacks=[waits],
    )
    pretended.waits.clear()
    fit.fit(module, loader(batches), loader(batches[:1]))
    return module, waits, float(fit.callback_metrics["val/tau"])


LAYOUTS = [*((name, PACKED) for name in VARIANTS), ("hass", SINGLE)]


@pytest.mark.parametrize(
    ("name", "lengths"), LAYOUTS, ids=lambda x: x if isinstance(x, str) else f"{len(x[0])} in a row"
)
def test_a_training_on_a_device_is_the_one_on_the_host(name, lengths, device):
    """Losses of every step and validation, with gradients clipped and accumulated."""
    batches = [make_batch(lengths, seed=seed) for seed in range(4)]
    _, host, tau = fitted(name, torch.device("cpu"), batches, accumulate=2)
    _, there, simulated = fitted(name, device, batches, accumulate=2)
    assert there.losses == pytest.approx(host.losses, rel=1e-5, nan_ok=True)
    assert simulated == pytest.approx(tau, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "lengths"), LAYOUTS, ids=lambda x: x if isinstance(x, str) else f"{len(x[0])} in a row"
)
def test_no_step_waits_for_the_device(name, lengths, device):
    """Copies of the batch, the target's pass, the rollout, the optimizer and what is logged: all of it is queued."""
    batches = [make_batch(lengths, seed=seed) for seed in range(3)]
    _, waits, _ = fitted(name, device, batches)
    assert waits.steps[1:] == [[], []]  # the first step makes the optimizer's state


def test_segments_that_are_run_apart_are_planned_on_the_host(device, monkeypatch):
    """Long packed rows: without a mask, the target runs over their segments."""
    batches = [make_batch(PACKED, seed=seed) for seed in range(3)]
    _, host, _ = fitted("eagle", torch.device("cpu"), batches)
    monkeypatch.setattr("eaglelab.target.sequences.MASKED_LENGTH", 8)
    _, waits, _ = fitted("eagle", device, batches)
    assert waits.losses == pytest.approx(host.losses, rel=1e-5)
    assert waits.steps[1:] == [[], []]
    assert unpacking.MASKED_LENGTH > 8


def test_a_pass_that_is_started_early_waits_no_more(device):
    target, batches = tiny_target(), [make_batch(PACKED, seed=seed) for seed in range(3)]
    target.to(device)
    source = FeaturesAhead(OnlineFeatures(target))
    with pretended.counting() as waits:
        for batch in looking_ahead(iter(batches)):
            planned = dataclasses.replace(batch, sequences=source.plan(batch))
            source.of(planned.to(device, non_blocking=True), (FINAL,))
    assert waits == []


def test_a_batch_keeps_its_plan_on_the_way(device):
    """What was planned on the host is on the device with the batch, and is the plan of the batch."""
    target, batch = tiny_target(), make_batch(PACKED)
    batch = dataclasses.replace(batch, sequences=(target.plan_sequences(batch.tokens_BS, segment_BS=batch.segment_BS),))
    with pretended.counting() as waits:
        moved = batch.to(device, non_blocking=True)
    assert waits == []
    for field in ("tokens_BS", "position_BS", "segment_BS"):
        assert getattr(moved.sequences[0], field).device == device
        assert torch.equal(getattr(moved.sequences[0], field).cpu(), getattr(batch.sequences[0], field))
