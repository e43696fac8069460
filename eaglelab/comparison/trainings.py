"""The trainings of a comparison: composed from recipes, resumable, one run folder each."""

from __future__ import annotations

import ctypes
import gc
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from eaglelab.comparison.budget import Spent, resolve, scaled
from eaglelab.comparison.plan import Plan
from eaglelab.target import FrozenTarget
from eaglelab.training import RunFolder, read_checkpoint, train

Compose = Callable[[Sequence[str], Path], DictConfig]
"""(overrides, run folder) -> the training configuration, as the train verb composes it."""


class Interrupted(KeyboardInterrupt):
    """Somebody asked to stop; everything that was done is kept."""


class Trainings:
    """What of a plan is trained here.

    Args:
        plan: the comparison.
        compose: composes a training configuration.

    Raises:
        ValueError: a recipe that a comparison cannot put under a budget, with the way out.
    """

    def __init__(self, plan: Plan, compose: Compose) -> None:
        self.plan = plan
        self._compose = compose
        self.configs = {name: self.compose(name, plan.seeds[0]) for name in plan.recipes}
        for name, config in self.configs.items():
            _check_trainable(name, config)

    def folder(self, name: str, seed: int) -> Path:
        return run_path(self.plan.out, name, seed)

    def compose(self, name: str, seed: int) -> DictConfig:
        """A name's training configuration, before the budget."""
        return self._compose(self.overrides(name, seed), self.folder(name, seed))

    def overrides(self, name: str, seed: int) -> list[str]:
        """Those of all trainings, then the recipe's; ``{runs}`` and ``{seed}`` in a recipe are filled in, so that one
        training can start from another of the comparison: ``init_from={runs}/eagle-seed{seed}``."""
        filled = [
            one.replace("{runs}", str(self.plan.out / "runs")).replace("{seed}", str(seed))
            for one in self.plan.recipes[name]
        ]
        return [*self.plan.train, *filled, f"seed={seed}"]

    def target(self) -> FrozenTarget:
        """The target that all of them train for.

        Raises:
            ValueError: recipes of different targets.
        """
        settings = {name: OmegaConf.to_container(config.target, resolve=True) for name, config in self.configs.items()}
        (first, wanted), *others = settings.items()
        for name, one in others:
            if one != wanted:
                raise ValueError(
                    f"{first} trains for target {wanted} and {name} for {one}; a comparison has one target: set it "
                    "for all with train=['target=...']"
                )
        return FrozenTarget.load(**self.configs[first].target)

    def resolve(self, target: FrozenTarget, names: Sequence[str]) -> dict[str, Spent]:
        """Optimizer steps of each name, by the plan's budget."""
        return resolve({name: self.configs[name] for name in names}, target, self.plan.budget) if names else {}

    def finished(self, name: str, seed: int, steps: int) -> bool:
        """Whether the run folder holds the whole training."""
        return finished(RunFolder(self.folder(name, seed)), steps)

    def run(self, name: str, seed: int, spent: Spent) -> None:
        """Train to the end, from the beginning or from where an earlier call was cut short.

        Raises:
            Interrupted: Ctrl-C or SIGTERM; the run folder holds everything so far.
        """
        folder = RunFolder(self.folder(name, seed))
        overrides = self.overrides(name, seed)
        config = scaled(self.compose(name, seed), spent.steps)
        config.ckpt_path = "last" if _resumable(folder, spent.steps) else None
        record_configuration(config, overrides, folder.path)
        before = folder.read_metrics().get("comparison", {})
        with _PeakMemory(on_gpu=config.trainer.accelerator != "cpu" and torch.cuda.is_available()) as peak:
            result = train(config, folder.path)
        torch.use_deterministic_algorithms(False)  # a training's setting, not decoding's
        most = max(filter(None, (before.get("peak_memory_mib"), peak.mib)), default=None)
        folder.update_metrics({"comparison": {"spent": spent.to_dict(), "peak_memory_mib": most}})
        if result.interrupted:
            raise Interrupted


def run_path(out: Path, name: str, seed: int) -> Path:
    """Where the run of a name and a seed lies."""
    return out / "runs" / f"{name}-seed{seed}"


def finished(folder: RunFolder, steps: int) -> bool:
    """The training ended by itself after that many steps."""
    training = folder.read_metrics().get("training") or {"interrupted": True}
    return not training["interrupted"] and training["optimizer_steps"] == steps


def _resumable(folder: RunFolder, steps: int) -> bool:
    """Whether there is a part of the training to go on from; what cannot be continued is removed."""
    last = folder.checkpoints / "last.ckpt"
    if not last.exists():
        return False
    try:
        if read_checkpoint(last)["global_step"] <= steps:
            return True
    except ValueError:
        pass
    shutil.rmtree(folder.checkpoints)  # damaged, or of a longer training
    return False


def record_configuration(config: DictConfig, overrides: Sequence[str], run_dir: Path) -> None:
    """Write ``.hydra/`` into a run folder, as a run of the train verb leaves it."""
    folder = run_dir / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    recorded = OmegaConf.merge(config, {"ckpt_path": None})
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(recorded), encoding="utf-8")
    (folder / "overrides.yaml").write_text(OmegaConf.to_yaml(list(overrides)), encoding="utf-8")


def _check_trainable(name: str, config: DictConfig) -> None:
    way_out = f"train it with `eaglelab train` and pass its folder with 'runs={{{name}: DIR}}'"
    if config.stages:
        raise ValueError(f"{name} has stages, and a budget knows one training only; {way_out}")
    if str(config.trainer.get("devices", 1)) not in ("1", "auto") or config.trainer.get("num_nodes", 1) != 1:
        raise ValueError(f"{name} trains on several processes, which a comparison does not start; {way_out}")


class _PeakMemory:
    """Most memory in use within the block: allocated on a GPU, else resident in this process (Linux; elsewhere None).

    Resident memory counts libraries and the target too.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.mib: float | None = None

    def __enter__(self) -> _PeakMemory:
        gc.collect()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return self
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what earlier trainings freed is not this one's
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        except (OSError, AttributeError):
            pass
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_gpu:
            self.mib = torch.cuda.max_memory_allocated() / 2**20
        elif Path("/proc/self/status").is_file():
            lines = Path("/proc/self/status").read_text().splitlines()
            self.mib = next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)
