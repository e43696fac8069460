"""DeepSpeed's ZeRO-1 trains as one process does; where DeepSpeed is not installed, the way out is told."""

import importlib.util

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from lightning.pytorch.plugins import MixedPrecision
from omegaconf import OmegaConf

from eaglelab.cli.config import config_dir, register_resolvers
from eaglelab.training import ZeroStrategy
from eaglelab.training.strategies import require_no_scaler, shards_target
from eaglelab.variants import OptimConfig
from tests.training.processes import assert_same_training, be_process, free_port
from tests.training.test_measures import build, dealt, loader, union, variant_of
from tests.variants.test_eagle import trainer

INSTALLED = importlib.util.find_spec("deepspeed") is not None
JOBS = ("eagle", "hass", "eagle3", "empty end", "idle")
OPTIM = {"clip_norm": 0.05, "accumulate": 2}


def fitted(job, batches, steps, path, before=None, **settings):
    """Train up to ``steps`` optimizer steps over the same micro-batches, from a checkpoint if there is one; save."""
    module, fit = build(variant_of(job), **OPTIM), trainer(steps, **settings)
    fit.fit(module, loader(batches), ckpt_path=before, weights_only=True)
    assert fit.global_step == steps
    fit.save_checkpoint(path)
    return fit, module


def worker(rank: int, port: int, folder: str) -> None:
    be_process(rank, port)
    shares = {}
    for job in JOBS:
        at = [f"{folder}/{job}.{steps}.ckpt" for steps in (1, 2)]
        two = {"devices": 2, "strategy": ZeroStrategy()}
        _, module = fitted(job, dealt(rank)[job], 1, at[0], **two)
        fit, module = fitted(job, dealt(rank)[job], 2, at[1], at[0], **two | {"strategy": ZeroStrategy()})
        (optimizer,) = fit.strategy.optimizers
        held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        shares[job] = held / sum(p.numel() for p in module.network.parameters() if p.requires_grad)
        fit.validate(module, loader(dealt(0)[job][:1]), verbose=False)
    torch.save(shares, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    torch.multiprocessing.spawn(worker, (free_port(), str(folder)), nprocs=2)
    return folder


@pytest.mark.skipif(not INSTALLED, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("job", JOBS)
def test_two_processes_train_as_one(job, two_processes, tmp_path):
    """A step, a checkpoint and a resumed step; gloo, norm clipped, several backward passes per step."""
    both = [union(list(micro)) for micro in zip(*(dealt(rank)[job] for rank in range(2)), strict=True)]
    start = build(variant_of(job)).state_dict()
    for steps in (1, 2):
        before = tmp_path / "1.ckpt" if steps == 2 else None
        fitted(job, both, steps, tmp_path / f"{steps}.ckpt", before)
        one = torch.load(tmp_path / f"{steps}.ckpt", weights_only=True)
        two = torch.load(two_processes / f"{job}.{steps}.ckpt", weights_only=True)
        assert_same_training(one, two, start, weights=0.002, state=5e-5)
    for rank in range(2):
        assert torch.load(two_processes / f"{rank}.pt")[job] == pytest.approx(0.5, abs=0.01)


@pytest.mark.skipif(not INSTALLED, reason="DeepSpeed is not installed")
def test_one_process_goes_on_from_two(two_processes, tmp_path):
    """The same next step from either checkpoint."""
    both = [union(list(micro)) for micro in zip(*(dealt(rank)["hass"] for rank in range(2)), strict=True)]
    fitted("hass", both, 2, tmp_path / "2.ckpt", two_processes / "hass.1.ckpt")
    gone_on = torch.load(tmp_path / "2.ckpt", weights_only=True)["state_dict"]
    alone = torch.load(two_processes / "hass.2.ckpt", weights_only=True)["state_dict"]
    for name, weight in alone.items():
        assert (gone_on[name].double() - weight.double()).abs().mean() < 2e-6, name  # steps are of 1e-3


@pytest.mark.skipif(INSTALLED, reason="DeepSpeed is installed")
def test_without_deepspeed_the_way_out_is_told():
    with pytest.raises(ValueError, match="pip install deepspeed; or trainer=fsdp"):
        ZeroStrategy()


@pytest.mark.parametrize(
    ("optim", "says"),
    [({"name": "muon"}, "set optim.name=adamw"), ({"clip_value": 0.5}, "instead of optim.clip_value=0.5"), ({}, None)],
)
def test_recipes_that_deepspeed_cannot_follow_are_refused(optim, says):
    recipe = OptimConfig(lr=1e-3, **optim)
    if says is None:
        ZeroStrategy.require(recipe)
    else:
        with pytest.raises(ValueError, match=says):
            ZeroStrategy.require(recipe)


def test_other_stages_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match=r"zero_optimization\.stage=3"):
        ZeroStrategy({"stage": 3})


def test_fp16_is_refused_where_gradients_are_spread():
    with pytest.raises(ValueError, match=r"use trainer\.precision=bf16-mixed, trainer=ddp"):
        require_no_scaler(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    require_no_scaler(MixedPrecision("bf16-mixed", "cpu"))


def test_it_leaves_the_target_whole():
    register_resolvers()
    with initialize_config_dir(config_dir=config_dir(), version_base="1.3"):
        composed = {name: compose("train", overrides=[f"trainer={name}"]).trainer for name in ("deepspeed", "fsdp")}
    assert get_class(composed["deepspeed"].strategy._target_) is ZeroStrategy
    assert not shards_target(composed["deepspeed"]) and shards_target(composed["fsdp"])
    assert not shards_target(OmegaConf.create({"strategy": "ddp"})) and not shards_target(OmegaConf.create({}))
