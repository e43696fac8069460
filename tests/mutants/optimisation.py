"""Clipping, accumulation, schedule, empty batches, the frozen target."""

from __future__ import annotations

import torch

from tests.mutants.registry import EAGLE_LOSS, mutant


@mutant(
    "clip by value taken for clip by norm",
    "tests/variants/test_eagle.py::test_clipping_by_value_is_not_clipping_by_norm",
)
def clip_confused() -> None:
    from eaglelab.variants import DraftingModule

    clip = DraftingModule.clip_gradients
    DraftingModule.clip_gradients = lambda self, *a, **kw: clip(self, *a, **kw | {"gradient_clip_algorithm": "norm"})


@mutant("gradient accumulation wiped", "tests/variants/test_eagle.py::test_accumulation_equals_one_larger_batch")
def accumulation_wiped() -> None:
    from eaglelab.variants import DraftingModule

    step = DraftingModule.training_step

    def wiping(self, batch, batch_idx):
        self.network.zero_grad()
        return step(self, batch, batch_idx)

    DraftingModule.training_step = wiping


@mutant("warm-up advanced too often", "tests/variants/test_optim.py::test_scheduler_advances_once_per_optimizer_step")
def warm_up_twice() -> None:
    from torch.optim.lr_scheduler import LambdaLR

    step = LambdaLR.step
    LambdaLR.step = lambda self: (step(self), step(self))[0]


@mutant("target left in train mode", EAGLE_LOSS)
def target_trains() -> None:
    from torch import nn

    from eaglelab.target import FrozenTarget

    FrozenTarget.train = nn.Module.train
    init = FrozenTarget.__init__

    def waking(self, *args, **kw):
        init(self, *args, **kw)
        self.train()

    FrozenTarget.__init__ = waking


@mutant(
    "empty batch still decays the weights",
    "tests/variants/test_eagle.py::test_empty_plan_changes_nothing_not_even_by_weight_decay",
)
def empty_batch_steps() -> None:
    from eaglelab.variants import DraftingModule

    step = DraftingModule.training_step

    def always(self, batch, batch_idx):
        step(self, batch, batch_idx)
        if batch.rows.num_supervised == 0:
            for p in self.network.parameters():
                p.grad = torch.zeros_like(p)
            self._update()

    DraftingModule.training_step = always
