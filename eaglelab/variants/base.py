"""What every variant's training shares; a variant adds its drafter, its context and its objective.

Letters: B sequences, R rows, M supervised rows.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from eaglelab.data.batch import Batch
from eaglelab.data.draft_vocabulary import DraftVocabulary
from eaglelab.data.needed import NeededRows, needed_rows
from eaglelab.data.rows import Rows
from eaglelab.drafters import DrafterConfig, DraftNetwork, SlotDrafter, compile_parts
from eaglelab.features.source import FeatureSource, OnlineFeatures
from eaglelab.stopwatch import Stopwatch
from eaglelab.target import FeatureManifest, FrozenTarget, Tap
from eaglelab.variants.contract import Contract
from eaglelab.variants.manifest import build_manifest, require_same_contract
from eaglelab.variants.measures import Measure, RowMeans, mean
from eaglelab.variants.optim import OptimConfig
from eaglelab.variants.simulation import ChainSimulation
from eaglelab.variants.view import View


@dataclasses.dataclass
class Pass:
    """One back-propagated pass over the rows.

    Attributes:
        loss: normalised by :meth:`DraftingModule.row_count`.
        terms: what the loss is made of, not normalised: the quotients add up to it.
        measures: what else to log about it.
    """

    loss: Tensor
    terms: list[Measure]
    measures: dict[str, Measure]

    @property
    def means(self) -> dict[str, Tensor]:
        """The measures of this micro-batch and process alone."""
        return {name: mean(measure) for name, measure in self.measures.items()}

    def weighted(self, weight: float, step: int) -> Pass:
        """As step ``step`` of a rollout, with that weight in the loss."""
        measures = {f"{name}/step{step}" if step else name: measure for name, measure in self.measures.items()}
        return Pass(weight * self.loss, [(weight * total, count) for total, count in self.terms], measures)

    @classmethod
    def joined(cls, passes: Sequence[Pass]) -> Pass:
        """Several passes that are back-propagated together."""
        loss = torch.zeros_like(passes[0].loss)
        for one in passes:
            loss = loss + one.loss
        measures = {name: measure for one in passes for name, measure in one.measures.items()}
        return cls(loss, [term for one in passes for term in one.terms], measures)


class Shards(Protocol):
    """A drafter, or its optimizer's state, spread over processes; all of them call the same, in the same order."""

    clips: bool
    """Whether the gradient is clipped by its norm without the module's doing."""

    def gather(self) -> None:
        """Make the drafter's weights whole, for any number of passes."""

    def reduce_gradients(self) -> None:
        """Average the gradients of all passes over the processes; each keeps its share."""


class DraftingModule(L.LightningModule, ABC):
    """Trains a drafter beside its frozen target.

    The target is not a submodule: Lightning cannot put it in train mode, move it into a checkpoint or hand it to
    an optimizer. Passes are back-propagated one after the other (manual optimisation), so that memory is that of
    one pass; a batch without supervised rows changes nothing, weight decay included.

    Subclasses set ``variant``, ``taps`` and ``contract_type`` and write :meth:`build_network` and :meth:`passes`.

    Args:
        target: the frozen target.
        optim: recipe.
        drafter: overrides of :class:`DrafterConfig`.
        chain_depth: depth of the simulated chain in validation.
        source: where features come from; None: the target is run over every batch.
        checkpoint_steps: EAGLE-3: keep a rollout step's state, keys and values only and compute the rest again in the
            backward: less memory, more time.
        compiled: ``torch.compile`` for the parts of the drafter between two attentions.
        seed: of the noise; the draw depends on seed, micro-batch and process alone.
        answer_counts: how often each target id occurs in the answers of the training split, [V]; asked for only by
            variants with a reduced draft vocabulary.
        switches: fields of ``contract_type``, recorded in the manifest.

    Raises:
        ValueError: a setting out of its range, or of another variant, with the way out.
    """

    variant: ClassVar[str]
    contract_type: ClassVar[type[Contract]] = Contract
    contract: Contract
    taps: tuple[Tap, ...] = ("final",)
    has_steps: ClassVar[bool] = False
    """Whether a loss keeps several rollout steps until its backward."""

    def __init__(
        self,
        target: FrozenTarget,
        optim: OptimConfig,
        *,
        drafter: dict[str, Any] | None = None,
        chain_depth: int = 5,
        source: FeatureSource | None = None,
        seed: int = 0,
        checkpoint_steps: bool = False,
        compiled: bool = False,
        answer_counts: Callable[[], Tensor] | None = None,
        **switches: Any,
    ) -> None:
        super().__init__()
        self.contract = self.contract_type(**switches)
        self.automatic_optimization = False
        self.__dict__["target"] = target  # kept out of the module tree, see above
        self.source: FeatureSource = OnlineFeatures(target) if source is None else source
        self.optim = optim
        self.seed = seed
        if checkpoint_steps and not self.has_steps:
            raise ValueError(
                f"checkpoint_steps=true does nothing for {self.variant}, which keeps one pass at a time; leave it out"
            )
        self.checkpoint_steps = checkpoint_steps
        self.answer_counts = answer_counts
        self.draft_vocabulary: DraftVocabulary | None = None
        self.report: dict[str, Any] = {}
        self.drafter_config = DrafterConfig.from_target(target.text_config, num_taps=len(self.taps), **(drafter or {}))
        self.network: DraftNetwork = self.build_network(self.drafter_config)
        if compiled:
            compile_parts(self.network)
        self.chain = ChainSimulation(chain_depth)
        self.measured = RowMeans()
        self.micro_step = 0
        self.skipped_batches = 0
        self.supervised_rows = 0
        self._target_watches: list[Stopwatch] = []
        self._has_gradient = self._gradient_is_local = False
        self._seconds_before, self._began = 0.0, time.perf_counter()

    target: FrozenTarget

    @classmethod
    def taps_for(cls, target: FrozenTarget, taps: Sequence[Tap] | None = None) -> tuple[Tap, ...]:
        """The target streams that the drafter reads; ``taps`` is the variant's setting of that name, if it has one."""
        return cls.taps

    @classmethod
    @abstractmethod
    def build_network(cls, config: DrafterConfig) -> DraftNetwork:
        """The drafter network, freshly initialised, in fp32."""

    @property
    def num_passes(self) -> int:
        """How many passes :meth:`passes` yields now."""
        return 1

    @property
    def num_steps(self) -> int:
        """Rollout steps that enter the loss, at most."""
        return 1

    @abstractmethod
    def passes(self, view: View) -> Iterator[Pass]:
        """The variant's passes over one micro-batch. Each is back-propagated before the next one is asked for."""

    def supervised(self, rows: Rows, step: int = 0) -> Tensor:
        """int64 [M], roots ``b * R + r`` whose rollout step ``step`` enters the loss; a variant may ask for more."""
        return rows.supervised_slots(step)

    skips_rows: bool = True
    """Leave out queries, MLP and outputs of rows that reach no loss; False computes them all, with the same result."""

    def needed(self, rows: Rows) -> NeededRows:
        """What the rollout needs of ``rows``; where a trainer moves batches, it was planned on the host before."""
        if rows.needed is not None:
            return rows.needed
        loss = [self.supervised(rows, step) for step in range(self.num_steps)]
        return needed_rows(rows, loss, all_rows=not self.skips_rows)

    def observe(self, measures: dict[str, Measure]) -> None:
        """See the measures of a micro-batch; a variant may keep some for its report."""

    # ---- training -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        strategy = self.trainer.strategy
        if getattr(strategy, "shards_target", False):
            self.target.shard(strategy.root_device)
        else:
            self.target.to(strategy.root_device)  # self.device is set later

    @property
    def seconds(self) -> float:
        """Wall time of training so far, earlier sessions of a resumed run included."""
        return self._seconds_before + time.perf_counter() - self._began

    @property
    def between_steps(self) -> bool:
        """Whether the present micro-batch is the last of its optimizer step; the place to stop and to save."""
        return self.micro_step % self.optim.accumulate == 0

    @property
    def whole_steps(self) -> int:
        """Optimizer steps of the whole training."""
        trainer = self.trainer
        if trainer.max_steps > 0:
            return trainer.max_steps
        return int(trainer.estimated_stepping_batches) // self.optim.accumulate

    def on_fit_start(self) -> None:
        self._began = time.perf_counter()

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.optim.build(self.network.named_parameters(), self.whole_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def generator(self) -> torch.Generator:
        """The random stream of this micro-batch; no stream has to be saved to resume."""
        mixed = (self.seed * 1_000_003 + self.micro_step) * 4_099 + self.global_rank
        return torch.Generator().manual_seed(mixed % 2**63)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Plan on the host, so that no step waits for the device."""
        batch = dataclasses.replace(batch, sequences=self.source.plan(batch))
        if not self.trainer.training:
            return batch
        return dataclasses.replace(batch, rows=dataclasses.replace(batch.rows, needed=self.needed(batch.rows)))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Queue the copies; Lightning's own wait for each tensor of a batch that is none itself."""
        return batch.to(device, non_blocking=True)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.micro_step += 1
        rows = self._over_processes(self.needed(batch.rows).loss[0].numel())
        if rows:
            self.supervised_rows += int(rows)
            self._backward_passes(batch)
            self._has_gradient = True
        else:
            self.skipped_batches += 1
        if self.between_steps and self._has_gradient:
            self._log_training()
            self._update()

    def _backward_passes(self, batch: Batch) -> None:
        """Gradients of one micro-batch."""
        self._gather()
        watch = Stopwatch(self.target.device)
        view = View.of(batch, self.target, self.taps, self.source)
        watch.mark()
        self._target_watches.append(watch)
        terms: list[Measure] = []
        measures: dict[str, Measure] = {}
        for number, one in enumerate(self.passes(view), start=1):
            last = self.between_steps and number == self.num_passes
            with nullcontext() if last else self._unsynchronised():
                self.manual_backward(one.loss / self.optim.accumulate)
            self._gradient_is_local = not last
            terms += one.terms
            measures |= one.measures
        self.measured.update(terms, measures)
        self.observe(measures)

    def _update(self) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert isinstance(optimizer, LightningOptimizer)
        assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
        if self._shards is not None:
            self._shards.reduce_gradients()
        elif self._gradient_is_local:
            self._average_gradients()
        if self._scaler is None:
            self._clip(optimizer.optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        self._has_gradient = False

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        """Of ``trainer.precision=16-mixed``: until the step gradients are multiples of what they are."""
        scaler: torch.amp.GradScaler | None = getattr(self.trainer.precision_plugin, "scaler", None)
        return scaler

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is None:
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # it divides by itself, unless that is done
            self._scaler.unscale_(optimizer)
        self._clip(optimizer)

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        if (limit := self.optim.clip_value) is not None:
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="value")
        if (limit := self.optim.clip_norm) is not None and not getattr(self._shards, "clips", False):
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by ``value`` or ``norm``. Lightning's own refuses fused optimizers under mixed precision, since their
        gradients might be scaled; here they are not."""
        assert gradient_clip_val is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(parameters, gradient_clip_val)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val)

    @property
    def _shards(self) -> Shards | None:
        """Set where the strategy spreads the drafter, or its optimizer's state, over the processes."""
        return None if self._trainer is None else getattr(self.trainer.strategy, "drafter_shards", None)

    def _gather(self) -> None:
        if self._shards is not None:
            self._shards.gather()

    def _unsynchronised(self) -> AbstractContextManager[None]:
        """Gradients stay on their process: they are exchanged once per step, by its last pass."""
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()

    def _average_gradients(self) -> None:
        """Over the processes; what the last backward of a step does, for a step whose last micro-batch was empty."""
        if self.trainer.world_size > 1:
            for parameter in self.network.parameters():
                if parameter.grad is not None:
                    parameter.grad = self.trainer.strategy.reduce(parameter.grad, reduce_op="mean")

    def row_count(self, rows: int | Tensor) -> float | Tensor:
        """What a sum over ``rows`` rows of this process is divided by: the mean of that number over all processes.

        Gradients are averaged over processes, so the result is the mean over *all* rows, however unevenly they are
        dealt. At least 1, so that a process without rows stays finite.
        """
        processes = 1 if self._trainer is None else self.trainer.world_size
        total = self._over_processes(rows)
        return total.clamp(min=1) / processes if isinstance(total, Tensor) else max(total, 1) / processes

    def _over_processes(self, count: int | Tensor) -> int | Tensor:
        """Sum over the processes; free on a single one."""
        if self._trainer is None or self.trainer.world_size == 1:
            return count
        local = torch.as_tensor(count, device=self.device).clone()  # reduced in place
        total = self.trainer.strategy.reduce(local, reduce_op="sum")
        return total if isinstance(count, Tensor) else int(total)

    def _log_training(self) -> None:
        """Log the optimizer step: means over the rows of its micro-batches and of all processes."""
        means = self.measured.compute()
        self.measured.reset()
        # none for Lightning's progress bar: it would fetch their values in every step
        self.log_dict({f"train/{k}": v for k, v in means.items()}, batch_size=1)
        schedule = self.lr_schedulers()
        assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
        on_host = {
            "lr": schedule.get_last_lr()[0],
            "seconds": self.seconds,
            "target_seconds": self._target_seconds(),
            "supervised_rows": float(self.supervised_rows),
            "skipped_batches": float(self.skipped_batches),
        }
        # a number that is no tensor would be copied to the device, and the host would wait for that
        self.log_dict({f"train/{name}": torch.tensor(value) for name, value in on_host.items()}, batch_size=1)

    def _target_seconds(self) -> float:
        """Time of the target's passes since it was asked for last; those that a device has not ended yet come later."""
        watches, self._target_watches = self._target_watches, []
        seconds = 0.0
        for watch in watches:
            if watch.passed:
                seconds += watch.between(0, 1)
            else:
                self._target_watches.append(watch)
        return seconds

    # ---- validation -----------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self._gather()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.chain.update(self.network, View.of(batch, self.target, self.taps, self.source))

    def on_validation_epoch_end(self) -> None:
        measured = self.chain.compute()
        self.chain.reset()
        self.log("val/tau", measured.pop("tau"))
        self.log_dict({f"val/{name}": value for name, value in measured.items()})

    # ---- what a checkpoint carries --------------------------------------------------------------------------

    def manifest(self) -> FeatureManifest:
        """Every semantic address that this drafter's weights depend on."""
        return build_manifest(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["manifest"] = self.manifest().to_dict()
        checkpoint["progress"] = {
            "micro_step": self.micro_step,
            "skipped_batches": self.skipped_batches,
            "supervised_rows": self.supervised_rows,
            "seconds": self.seconds,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take up a saved state of the same contract.

        Raises:
            ManifestMismatch: the checkpoint belongs to another target, address, drafter or objective.
        """
        require_same_contract(FeatureManifest.from_dict(checkpoint["manifest"]), self)
        progress = checkpoint["progress"]
        self.micro_step = progress["micro_step"]
        self.skipped_batches = progress["skipped_batches"]
        self.supervised_rows = progress["supervised_rows"]
        self._seconds_before = progress["seconds"]

    # ---- decoding -------------------------------------------------------------------------------------------

    def drafter(self) -> SlotDrafter:
        """The trained network behind the decoding protocol."""
        return SlotDrafter(self.network, self.target, self.taps)
