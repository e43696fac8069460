"""Callbacks of a training run: one progress bar over its steps, and a stop that loses nothing."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from eaglelab.data.batch import Batch

SHOWN = ("train/loss", "train/accuracy", "val/tau")


class StepProgressBar(ProgressBar):
    """One bar over ``max_steps`` with loss, draft accuracy, simulated tau and tokens per second."""

    def __init__(self, refresh_seconds: float = 0.5) -> None:
        super().__init__()
        self._refresh_seconds = refresh_seconds
        self._bar: tqdm | None = None
        self._enabled = True
        self._tokens = 0
        self._began = 0.0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._tokens, self._began = 0, time.perf_counter()
        self._bar = tqdm(
            total=trainer.max_steps if trainer.max_steps > 0 else None,
            initial=trainer.global_step,
            desc=f"train {pl_module.variant}",
            unit="step",
            mininterval=self._refresh_seconds,
            dynamic_ncols=True,
            disable=not self._enabled or not trainer.is_global_zero,
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if self._bar is None or self._bar.disable:
            return
        self._tokens += batch.tokens_BS.numel() * trainer.world_size
        self._bar.update(trainer.global_step - self._bar.n)
        now = time.perf_counter()
        if now - self._bar.last_print_t < self._refresh_seconds and trainer.global_step < trainer.max_steps:
            return
        found = trainer.callback_metrics
        shown = {name.split("/")[-1]: f"{float(found[name]):.3f}" for name in SHOWN if name in found}
        shown["tok/s"] = f"{self._tokens / (now - self._began):,.0f}"
        self._bar.set_postfix(shown, refresh=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            self._bar.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


class GracefulStop(L.Callback):
    """Ctrl-C (or SIGTERM) ends the run after the optimizer step at hand is complete; a second Ctrl-C ends it at once.

    ``stopped`` tells afterwards whether the run was cut short that way.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._previous: dict[int, Any] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # In between Lightning has put its own handler for SIGTERM on top, which ends the process with code 0 and
        # without a checkpoint
        for number in self._previous:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        # every process must stop at the same step, and no accumulated gradient may be lost
        if not pl_module.between_steps:
            return
        if trainer.strategy.reduce_boolean_decision(self.stopped, all=False):
            self.stopped = trainer.should_stop = True

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.release()

    def release(self) -> None:
        """Give the signals back to whom they belonged; also after Lightning, which puts back those that it found."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class LastCheckpoint(L.Callback):
    """Keeps ``last.ckpt``: every ``every_n_steps`` optimizer steps, at the end, and on a graceful stop.

    The file is written aside and renamed, so that it is whole at any moment.
    """

    def __init__(self, dirpath: str, every_n_steps: int = 100) -> None:
        self.path = Path(dirpath) / "last.ckpt"
        self.every_n_steps = every_n_steps
        self._saved_step = -1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        due = self.every_n_steps > 0 and step % self.every_n_steps == 0 and step > 0
        if step != self._saved_step and (due or trainer.should_stop or step >= trainer.max_steps > 0):
            self._saved_step = step
            aside = self.path.with_suffix(".tmp")
            trainer.save_checkpoint(aside)
            if trainer.is_global_zero:
                aside.replace(self.path)
