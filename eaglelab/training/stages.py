"""A recipe of several stages as one command: each starts from the weights of the one before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from eaglelab.training.job import TrainingResult, train_once
from eaglelab.training.run_folder import RunFolder, read_checkpoint


def train(config: DictConfig, run_dir: str | Path, *, on_start: Callable[[], None] | None = None) -> TrainingResult:
    """Run ``config``, or the list of ``config.stages`` one after the other.

    A stage is a set of overrides of the whole configuration. All but the last leave run folders of their own,
    ``stage-1``, ``stage-2``, ...; the last one's is ``run_dir``. With ``ckpt_path=last`` finished stages are skipped
    and the interrupted one continues.

    Args:
        on_start: called when a training starts, before anything is written.

    Raises:
        ValueError, ManifestMismatch: see :func:`~eaglelab.training.job.train_once`.
    """
    if not config.stages:
        return train_once(config, run_dir, on_start=on_start)
    previous = config.init_from
    for number, overrides in enumerate(config.stages, start=1):
        last = number == len(config.stages)
        folder = RunFolder(Path(run_dir) if last else Path(run_dir) / f"stage-{number}")
        stage = OmegaConf.merge(config, overrides, {"stages": None, "init_from": previous, "run_dir": str(folder.path)})
        assert isinstance(stage, DictConfig)
        previous = str(folder.path)
        resumable = config.ckpt_path is not None and (folder.checkpoints / "last.ckpt").exists()
        if resumable and not last and _finished(folder):
            continue
        stage.ckpt_path = "last" if resumable else None
        result = train_once(stage, folder.path, on_start=on_start)
        if result.interrupted or last:
            return result
    raise AssertionError("the last stage returns")


def _finished(folder: RunFolder) -> bool:
    """The stage's training ended by itself, and its last checkpoint is that end."""
    training = folder.read_metrics().get("training", {"interrupted": True})
    if training["interrupted"]:
        return False
    return read_checkpoint(folder.checkpoint("last"))["global_step"] == training["optimizer_steps"]
