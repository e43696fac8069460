"""The training job: a composed configuration in, a run folder out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from eaglelab.data import ConversationDataModule
from eaglelab.data.draft_vocabulary import DraftVocabulary
from eaglelab.data.module import PackedDataModule
from eaglelab.features.ahead import FeaturesAhead
from eaglelab.features.data import StoreDataModule
from eaglelab.features.folders import Streaming
from eaglelab.features.source import FeatureSource, OnlineFeatures
from eaglelab.features.store import FeatureStore, StoreFeatures
from eaglelab.kernels import kernels
from eaglelab.target import FeatureManifest, FrozenTarget, HeadOnlyTarget, ShardedTarget
from eaglelab.training.callbacks import GracefulStop
from eaglelab.training.precision import require_budget, require_precision
from eaglelab.training.run_folder import RunFolder, read_checkpoint
from eaglelab.training.strategies import shards_target
from eaglelab.training.zero import ZeroStrategy
from eaglelab.variants import DraftingModule, OptimConfig
from eaglelab.variants.manifest import require_same_weights

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Where the run is, what it measured, whether it was cut short, and whether this process is the one to say so."""

    folder: RunFolder
    figures: dict[str, Any]
    interrupted: bool
    speaks: bool = True


def train_once(
    config: DictConfig, run_dir: str | Path, *, on_start: Callable[[], None] | None = None
) -> TrainingResult:
    """Train one variant as ``configs/train.yaml`` describes it.

    Writes manifest, checkpoints, logs and the ``training`` part of ``metrics.json``. With ``ckpt_path`` the run
    continues with the very next batch; uninterrupted training gives the same bits on a CPU. A run that was killed after
    its last step, before its figures were written, is validated and gets them.

    Args:
        on_start: called once the training is sure to start and before anything is written.

    Raises:
        ValueError: data, target or configuration that cannot be trained on, with the way out.
        ManifestMismatch: ``ckpt_path`` belongs to another contract.
    """
    with kernels(config.get("kernels", "auto")):
        return _train_once(config, run_dir, on_start)


def _train_once(config: DictConfig, run_dir: str | Path, on_start: Callable[[], None] | None) -> TrainingResult:
    folder = RunFolder(run_dir)
    ckpt_path = _resume_from(config, folder)
    require_precision(config.trainer.get("precision", "32-true"), config.target.dtype)
    require_budget(config.trainer)
    if type(config.seed) is not int or not 0 <= config.seed < 2**32:
        raise ValueError(f"seed={config.seed} must be a whole number from 0 to {2**32 - 1}")
    L.seed_everything(config.seed, workers=True, verbose=False)
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)

    store = open_store(config)
    target = _load_target(config, store)
    data = build_data(config, target) if store is None else build_stored_data(config, store)
    data.setup()
    module = build_module(config, target, data, store)
    data.looks_ahead = isinstance(module.source, FeaturesAhead)

    started_from = load_initial_weights(module, config.init_from) if config.init_from and not ckpt_path else None

    callbacks = [instantiate(one) for one in (config.callbacks or {}).values() if one is not None]
    trainer: L.Trainer = instantiate(
        config.trainer, callbacks=callbacks, logger=instantiate(config.logger) if config.logger else False
    )
    if isinstance(trainer.strategy, ZeroStrategy):
        trainer.strategy.require(module.optim)
    if ckpt_path is not None:  # refuse before anything in the folder changes
        require_resumable(module, ckpt_path)
    if trainer.is_global_zero:
        folder.path.mkdir(parents=True, exist_ok=True)
        if on_start is not None:
            on_start()
        module.manifest().save(folder.manifest_path)

    stops = [one for one in callbacks if isinstance(one, GracefulStop)]
    resumed_at = module.micro_step
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
    finally:
        for one in stops:
            one.release()
    # who stops a training in its last step gets a whole one
    interrupted = any(one.stopped for one in stops) and trainer.global_step < module.whole_steps
    figures = _figures(trainer, module, data) | {"interrupted": interrupted}
    if ckpt_path is not None and module.micro_step == resumed_at and not interrupted:
        figures["final"] |= _validated(trainer, module, data)
    figures["features"] = {"source": "online"} if store is None else store.to_dict()
    if started_from:
        figures["init_from"] = started_from
    if trainer.is_global_zero:
        folder.update_metrics({"training": figures})
    return TrainingResult(folder, figures, interrupted, trainer.is_global_zero)


def _load_target(config: DictConfig, store: FeatureStore | None) -> FrozenTarget:
    if store is not None:
        return HeadOnlyTarget.load(**config.target)
    return (ShardedTarget if shards_target(config.trainer) else FrozenTarget).load(**config.target)


def open_store(config: DictConfig) -> FeatureStore | None:
    """The feature store that the run reads; None: the target is run.

    Raises:
        ValueError: no finished store there, one that cannot be read, or neither of the two was asked for; ``ahead`` or
            ``compiled`` with a sharded target, whose processes gather its layers in one order.
    """
    features = config.get("features") or {"source": "online"}
    if features["source"] not in ("online", "store"):
        raise ValueError(f"features.source={features['source']!r} is not one of online, store")
    for name in ("ahead", "compiled"):
        if features.get(name) and shards_target(config.trainer):
            raise ValueError(
                f"features.{name}=true needs a whole target on each device, and this trainer shards it; leave it out"
            )
    if features["source"] == "online":
        return None
    streaming = {name: features[name] for name in ("cache", "cache_gib", "prefetch") if name in features}
    return FeatureStore(
        features["path"], streaming=Streaming(**streaming), shuffle_shards=features.get("shuffle_shards")
    )


def build_module(
    config: DictConfig, target: FrozenTarget, data: PackedDataModule, store: FeatureStore | None = None
) -> DraftingModule:
    """The variant's LightningModule, freshly initialised from ``seed``.

    Raises:
        ManifestMismatch: ``store`` is of another target, address, type or norm.
    """
    optim = OptimConfig(**_plain(config.optim))
    variant = instantiate(config.variant, _partial_=True, _convert_="all")
    module: DraftingModule = variant(
        target=target,
        optim=optim,
        seed=config.seed,
        checkpoint_steps=bool(config.get("checkpoint_steps")),
        compiled=bool(config.get("compiled")),
        answer_counts=lambda: data.answer_counts(target.vocab_size),
        source=_source(config, target, store),
    )
    if store is not None:
        store.require(target, module.taps)
    return module


def _source(config: DictConfig, target: FrozenTarget, store: FeatureStore | None) -> FeatureSource:
    features = config.get("features") or {}
    if store is not None:
        return StoreFeatures(store, target)
    if features.get("compiled"):
        target.compile_layers()
    source = OnlineFeatures(target, features.get("rows"))
    return FeaturesAhead(source) if features.get("ahead") else source


def build_stored_data(config: DictConfig, store: FeatureStore) -> StoreDataModule:
    """The data module of a feature store.

    Raises:
        ValueError: a data setting that is not the store's.
    """
    return StoreDataModule(store, supervise=config.variant.supervise, seed=config.seed, settings=_plain(config.data))


def build_data(config: DictConfig, target: FrozenTarget) -> ConversationDataModule:
    """The data module behind the target's tokenizer."""
    if target.tokenizer is None:
        raise ValueError(f"target {target.source} has no tokenizer; conversations cannot be tokenized")
    settings = _plain(config.data)
    if settings["max_length"] > target.max_positions:
        raise ValueError(
            f"data.max_length={settings['max_length']} is beyond the {target.max_positions} positions of target "
            f"{target.source}; lower data.max_length and data.row_length"
        )
    return ConversationDataModule(
        target.tokenizer,
        settings.pop("path"),
        settings.pop("val_path"),
        supervise=config.variant.supervise,
        seed=config.seed,
        **settings,
    )


def require_resumable(module: DraftingModule, ckpt_path: str) -> None:
    """Take up a checkpoint's progress.

    Raises:
        ValueError: the checkpoint is damaged, or an imported drafter's: weights without a training.
        ManifestMismatch: it belongs to another contract.
    """
    checkpoint = read_checkpoint(ckpt_path)
    if "progress" not in checkpoint:
        raise ValueError(
            f"ckpt_path={ckpt_path} holds a drafter's weights but no training to continue (it was imported); start "
            "from them with init_from=<the same> and another hydra.run.dir"
        )
    module.on_load_checkpoint(checkpoint)


def load_initial_weights(module: DraftingModule, source: str) -> str:
    """Start from another run's weights (a run folder or a checkpoint file); optimizer and counters start anew.

    Raises:
        ValueError: nothing there.
        ManifestMismatch: another target, taps, drafter shape or draft vocabulary.
    """
    path = RunFolder.existing(source).checkpoint("last") if Path(source).is_dir() else RunFolder("").checkpoint(source)
    checkpoint = read_checkpoint(path)
    saved = FeatureManifest.from_dict(checkpoint["manifest"], str(path))
    _adopt_vocabulary(module, checkpoint["state_dict"])
    require_same_weights(saved, module, source)
    module.load_state_dict(checkpoint["state_dict"], strict=True)
    return str(path)


def _adopt_vocabulary(module: DraftingModule, state: dict[str, torch.Tensor]) -> None:
    """A loaded head keeps the draft vocabulary that it was trained for, whatever this training's data would choose."""
    d2t_K, own = state.get("network.d2t"), module.draft_vocabulary
    if d2t_K is None or own is None or d2t_K.numel() != own.ids_K.numel():
        return  # nothing to adopt, or a difference that the manifests tell
    module.draft_vocabulary = DraftVocabulary(d2t_K + torch.arange(d2t_K.numel()), own.target_size)
    if module.answer_counts is not None:
        module.report |= {"answer_token_coverage": module.draft_vocabulary.coverage(module.answer_counts())}


def _resume_from(config: DictConfig, folder: RunFolder) -> str | None:
    """The checkpoint to continue from; ``last`` means this run folder's.

    Raises:
        ValueError: nothing there, or a fresh run would overwrite an older one.
    """
    if config.ckpt_path is not None:
        return str(folder.checkpoint(config.ckpt_path))
    if (folder.checkpoints / "last.ckpt").exists():
        raise ValueError(
            f"{folder.path} already holds a run; continue it with ckpt_path=last, or choose another hydra.run.dir"
        )
    return None


def _validated(trainer: L.Trainer, module: DraftingModule, data: PackedDataModule) -> dict[str, float]:
    """What a validation of a training that is over logs."""
    trainer.validate(module, data, verbose=False)
    return _logged(trainer)


def _logged(trainer: L.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.logged_metrics.items()}


def _figures(trainer: L.Trainer, module: DraftingModule, data: PackedDataModule) -> dict[str, Any]:
    return {
        "variant": module.variant,
        "optimizer_steps": trainer.global_step,
        "micro_steps": module.micro_step,
        "skipped_batches": module.skipped_batches,
        "supervised_rows": module.supervised_rows,
        "seconds": round(module.seconds, 2),
        "device": str(trainer.strategy.root_device),
        "processes": trainer.world_size,
        "drafter_parameters": sum(p.numel() for p in module.network.parameters()),
        **module.report,
        "data": data.report.to_dict(),
        "final": {name: value for name, value in _logged(trainer).items() if not name.endswith("_step")},
    }


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}
