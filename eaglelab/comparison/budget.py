"""How many optimizer steps a budget buys for each recipe."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from eaglelab.comparison.plan import Budget
from eaglelab.data import Batch
from eaglelab.data.module import PackedDataModule
from eaglelab.target import FrozenTarget
from eaglelab.target.shape import TargetShape
from eaglelab.training.flops import Load, step_flops
from eaglelab.training.job import build_data, build_module, build_stored_data, open_store

SAMPLED_BATCHES = 16  # for the shapes of a step
CALIBRATION_ROUNDS = 3  # of all configurations in turns
WARMUP_STEPS, TIMED_STEPS = 2, 3  # of a configuration in a round


@dataclasses.dataclass(frozen=True)
class Spent:
    """What a recipe's training will consist of.

    steps: optimizer steps.
    rows, flops, seconds: of one optimizer step, on average; flops None where a variant's are not known, seconds None
        unless the budget is in seconds.
    """

    steps: int
    rows: float
    flops: float | None
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def resolve(configs: Mapping[str, DictConfig], target: FrozenTarget, budget: Budget) -> dict[str, Spent]:
    """Steps for each name's training configuration.

    For a budget in seconds a few optimizer steps of every configuration are timed on the spot, by its own trainer and
    in turns, and the fastest one counts: what other jobs of the machine take is not the recipe's. HASS's two kinds of
    step are timed apart and weighted by their share.

    Raises:
        ValueError: data that cannot be trained on, or a budget that buys no step.
    """
    probes = {name: _Probe(config, target) for name, config in configs.items()}
    seconds: dict[str, float | None] = dict.fromkeys(configs)
    if budget.unit == "seconds":
        seconds |= _calibrate(probes)
    spent = {}
    for name, probe in probes.items():
        costs = {"steps": 1.0, "rows": probe.rows, "flops": probe.flops, "seconds": seconds[name]}
        cost = costs[budget.unit]
        if cost is None:
            raise ValueError(f"the operations of {name}'s steps are not known; use budget.unit=rows, steps or seconds")
        steps = round(budget.of(name) / cost)
        if steps < 1:
            raise ValueError(
                f"budget.value={budget.of(name):g} {budget.unit} buys no optimizer step of {name}: one takes {cost:.3g}"
            )
        spent[name] = Spent(steps, probe.rows, probe.flops, seconds[name])
    return spent


class _Probe:
    """The data and the modules of one configuration."""

    def __init__(self, config: DictConfig, target: FrozenTarget) -> None:
        self.target = target
        self.store = open_store(config)
        self.data: PackedDataModule = (
            build_data(config, target) if self.store is None else build_stored_data(config, self.store)
        )
        self.data.setup()
        self.accumulate = int(config.optim.accumulate)
        loader = self.data.train_dataloader()
        micro_batches = len(loader)
        self.rows = self.data.report.train.supervised_rows / micro_batches * self.accumulate
        self.batches = list(itertools.islice(loader.batches(0), SAMPLED_BATCHES))
        self.configs = _phases(config)
        self.flops = self._flops(config, self.rows / self.accumulate)

    def _flops(self, config: DictConfig, supervised: float) -> float | None:
        module = build_module(config, self.target, self.data, self.store)
        load = _load(self.batches, supervised)
        try:
            shape = TargetShape.of_model(self.target.model)
            count = step_flops(
                shape, module.drafter_config, module.contract, load, module.optim, online=self.store is None
            )
        except ValueError:
            return None
        return count.total

    def timers(self) -> list[tuple[float, _Timer]]:
        """(share of the training, something to time) for each kind of step."""
        return [(share, _Timer(config, self)) for share, config in self.configs]


class _Timer(L.Callback):
    """Times optimizer steps of one configuration."""

    def __init__(self, config: DictConfig, probe: _Probe) -> None:
        self._trainer, self._data = config.trainer, probe.data
        self._module = build_module(config, probe.target, probe.data, probe.store)
        self.seconds: list[float] = []
        self._ends: list[float] = []

    def round(self) -> None:
        """A few steps from the first batch on."""
        self._ends = []
        off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
        steps = WARMUP_STEPS + TIMED_STEPS
        instantiate(self._trainer, callbacks=[self], max_steps=steps, max_epochs=-1, **off).fit(
            self._module, self._data
        )
        timed = self._ends[WARMUP_STEPS - 1 :]
        self.seconds += [end - begin for begin, end in itertools.pairwise(timed)]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *batch: Any) -> None:
        if self._module.between_steps:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            self._ends.append(time.perf_counter())


def _calibrate(probes: Mapping[str, _Probe]) -> dict[str, float | None]:
    timers = {name: probe.timers() for name, probe in probes.items()}
    for _ in range(CALIBRATION_ROUNDS):
        for kinds in timers.values():
            for _, timer in kinds:
                timer.round()
    return {name: sum(share * min(timer.seconds) for share, timer in kinds) for name, kinds in timers.items()}


def _phases(config: DictConfig) -> list[tuple[float, DictConfig]]:
    """Configurations with steps of one kind each, and their share of the training."""
    share = float(config.variant.get("eagle_share") or 0)
    if not share:
        return [(1.0, config)]
    aligned = {"eagle_share": 0.0}
    early = aligned | {"passes": 1, "pass_weights": None, "top_weight": 0.0}
    return [(share, _with(config, early)), (1 - share, _with(config, aligned))]


def _with(config: DictConfig, variant: dict[str, Any]) -> DictConfig:
    merged = OmegaConf.merge(config, {"variant": variant})
    assert isinstance(merged, DictConfig)
    return merged


def _load(batches: list[Batch], supervised: float) -> Load:
    """The mean micro-batch."""
    sequences = statistics.fmean(batch.tokens_BS.shape[0] for batch in batches)
    length = statistics.fmean(batch.tokens_BS.shape[1] for batch in batches)
    rows = statistics.fmean(batch.rows.source_BR.shape[1] for batch in batches)
    roots = statistics.fmean(int(batch.rows.supervised_BR.sum(1).max()) for batch in batches)
    return Load(round(sequences), round(length), round(rows), round(supervised), roots=round(roots))


def scaled(config: DictConfig, steps: int) -> DictConfig:
    """The configuration for a training of ``steps`` optimizer steps, its schedule stretched with it.

    A warm-up counted in steps and a decay that ends at a fixed step keep their share of the training; shares and
    decays to the end are so already. Validation comes as often as in the recipe, but at most ten times: it is outside
    of the budget and would take longer than a short training.
    """
    recipe = int(config.trainer.max_steps)
    if recipe <= 0:
        recipe = int(config.optim.total_steps or 0)
    optim = {}
    if recipe > 0:
        warmup, total = float(config.optim.warmup_steps), config.optim.total_steps
        if warmup >= 1:
            optim["warmup_steps"] = max(1, round(warmup * steps / recipe))
        if total is not None:
            optim["total_steps"] = max(1, round(int(total) * steps / recipe))
    batches = steps * int(config.optim.accumulate)
    interval = min(batches, max(1, batches // 10, _interval(config.trainer.val_check_interval)))
    trainer = {"max_steps": steps, "max_epochs": -1, "val_check_interval": interval}
    merged = OmegaConf.merge(config, {"optim": optim, "trainer": trainer})
    assert isinstance(merged, DictConfig)
    return merged


def _interval(setting: float | int | None) -> int:
    """Batches between validations; a share of an epoch or nothing set is no number of batches."""
    return setting if isinstance(setting, int) else 0
