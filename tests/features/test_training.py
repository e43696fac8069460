"""Training cannot tell a store from the target: same batches, same noise, same losses."""

import lightning as L
import pytest
import torch

from eaglelab.data.module import PackedDataModule
from eaglelab.features.data import StoreDataModule
from eaglelab.features.store import StoreFeatures
from eaglelab.variants import VARIANTS, OptimConfig
from tests.features.conftest import TAPS, prepared
from tests.features.test_store import settings

STEPS = 4
SWITCHES = {
    "eagle": {"noise": "paper_uniform"},
    "hass": {"noise": "gaussian"},
    "eagle3": {"taps": TAPS, "steps": 3, "draft_vocab_size": 40},
}


class OnlineData(PackedDataModule):
    """The rows of the store, without it."""

    padded_length = 24

    def setup(self, stage=None):
        self._splits = prepared().train_rows, prepared().val_rows


class Losses(L.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items() if "seconds" not in k})


def train(target, variant, data, source=None, **switches):
    torch.manual_seed(0)
    data.setup()
    optim = OptimConfig(lr=5e-3, schedule="constant", total_steps=STEPS, accumulate=2)
    counts = lambda: data.answer_counts(target.vocab_size)  # noqa: E731
    options = SWITCHES[variant] | switches
    module = VARIANTS[variant](target, optim, seed=7, answer_counts=counts, source=source, chain_depth=2, **options)
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        max_epochs=-1,
        val_check_interval=4,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[losses],
    )
    trainer.fit(module, data)
    return module, losses.seen


def online(target, variant, **switches):
    data = OnlineData(batch_size=2, supervise="advanced", seed=3, num_workers=0)
    return train(target, variant, data, **switches)


def offline(target, variant, store, **switches):
    data = StoreDataModule(store, supervise="advanced", seed=3, settings=settings())
    store.require(target, TAPS if variant == "eagle3" else ("final",))
    return train(target, variant, data, StoreFeatures(store, target), **switches)


@pytest.mark.parametrize("variant", VARIANTS)
def test_offline_and_online_training_give_the_same_losses(store, deep_target, variant):
    one, here = online(deep_target, variant)
    with pytest.MonkeyPatch.context() as patched:  # a store that runs the target would not be one
        opened = store(dtype="float32")
        patched.setattr(type(deep_target), "features", lambda *_, **__: pytest.fail("the target was run"))
        two, there = offline(deep_target, variant, opened)
    assert len(here) == len(there) and here[-1].keys() == there[-1].keys()
    assert any("train/loss" in metrics for metrics in here) and "val/tau" in here[-1]
    for a, b in zip(here, there):
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-5), name
    for a, b in zip(one.network.parameters(), two.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_bfloat16_features_change_the_losses_by_their_rounding_alone(store, deep_target, variant):
    _, here = online(deep_target, variant)
    _, there = offline(deep_target, variant, store(dtype="bfloat16"))
    share = max(abs(b["train/loss"] / a["train/loss"] - 1) for a, b in zip(here, there) if "train/loss" in a)
    assert 0 < share < 1e-2


def test_a_distribution_of_many_tokens_is_as_good_as_the_last_feature(store, deep_target):
    _, here = online(deep_target, "eagle3")
    _, there = offline(deep_target, "eagle3", store(dtype="float32", top_k=59))
    for a, b in zip(here, there):
        for name in a.keys() & b.keys():
            if name.startswith(("train/loss", "train/distillation")):
                assert b[name] == pytest.approx(a[name], rel=2e-3, abs=2e-3), name
    absent = here[-1].keys() - there[-1].keys()
    assert absent and all("regression" in name or "feature_error" in name for name in absent)


def test_a_feature_loss_needs_last_features(store, deep_target):
    with pytest.raises(ValueError, match=r"variant.feature_weight=0.1 needs the target's last features"):
        offline(deep_target, "eagle3", store(top_k=4), feature_weight=0.1)
