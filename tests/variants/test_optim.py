"""Learning-rate laws and what advances them."""

import copy

import pytest
import torch

from eaglelab.variants import OptimConfig
from tests.variants.conftest import eagle, loader, make_batch
from tests.variants.test_eagle import trainer


@pytest.mark.parametrize("warmup", [4, 0.2])
def test_linear_warm_up_and_decay(warmup):
    config = OptimConfig(lr=1.0, warmup_steps=warmup, schedule="linear", final_lr_ratio=0.1)
    law = [config.lr_scale(step, 20) for step in range(21)]
    assert law[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert law[4] == 1.0
    assert law[12] == pytest.approx(0.1 + 0.9 * 0.5)
    assert law[20] == pytest.approx(0.1)
    assert config.lr_scale(99, 20) == pytest.approx(0.1)


def test_total_steps_of_a_published_recipe_outlast_the_run():
    config = OptimConfig(lr=1.0, warmup_steps=2000, total_steps=800_000)
    assert config.lr_scale(1999, 10) == pytest.approx(2000 / 2001)
    assert config.lr_scale(401_000, 10) == pytest.approx(0.5)


def test_cosine_and_constant():
    cosine = OptimConfig(lr=1.0, schedule="cosine")
    assert [cosine.lr_scale(s, 10) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0], abs=1e-12)
    assert OptimConfig(lr=1.0, schedule="constant").lr_scale(10**6, 10) == 1.0


def test_scheduler_advances_once_per_optimizer_step(target):
    """Not per micro-batch, not per process: after 6 micro-batches at accumulate 2, three steps have been taken."""
    config = {"lr": 1.0e-3, "warmup_steps": 9, "schedule": "linear", "accumulate": 2, "total_steps": 100}
    module = eagle(target, optim=config)
    fit = trainer(3)
    fit.fit(module, loader([make_batch(seed=i) for i in range(6)]))
    assert fit.global_step == 3
    assert module.lr_schedulers().get_last_lr() == pytest.approx([1e-3 * 4 / 10])


def test_frozen_parameters_are_left_out():
    kept, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer, _ = OptimConfig(lr=1.0).build([("a", kept), ("b", frozen)], 1)
    assert [p is kept for group in optimizer.param_groups for p in group["params"]] == [True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": (0.9,)}, "two numbers"),
        ({"betas": (0.9, 1.0)}, "two numbers"),
        ({"accumulate": 0}, "must be positive"),
        ({"lr": 0.0}, "must be positive"),
    ],
)
def test_recipes_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimConfig(**{"lr": 1.0} | settings)


def test_muon_takes_the_matrices_and_one_state_restores_both():
    """Two steps, save, one more; a fresh optimizer that loads the state takes the same third step."""

    def build():
        torch.manual_seed(0)
        network = torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 6), "lm_head": torch.nn.Linear(6, 3, bias=False)})
        optimizer, scheduler = OptimConfig(lr=0.1, name="muon").build(network.named_parameters(), 10)
        return network, optimizer, scheduler

    def step(network, optimizer, scheduler, seed):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        network["lm_head"](network["fc"](x)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    one = build()
    assert [tuple(p.shape) for p in one[1].param_groups[0]["params"]] == [(6, 4)]
    assert sorted(tuple(p.shape) for p in one[1].param_groups[1]["params"]) == [(3, 6), (6,)]
    for seed in (0, 1):
        step(*one, seed)
    saved = [
        {k: v.clone() for k, v in one[0].state_dict().items()},
        copy.deepcopy(one[1].state_dict()),
        one[2].state_dict(),
    ]
    other = build()
    for part, state in zip(other, saved, strict=True):
        part.load_state_dict(state)
    before = one[0]["fc"].weight.clone()
    step(*one, 2)
    step(*other, 2)
    assert other[1].param_groups[0]["lr"] == pytest.approx(0.07)
    for (name, a), b in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert a.equal(b), name
    assert not one[0]["fc"].weight.equal(before)
