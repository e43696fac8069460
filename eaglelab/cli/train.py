"""``eaglelab train``, also behind ``python train.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from eaglelab.cli.config import register_resolvers, require_multirun
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from eaglelab.training import TrainingResult

register_resolvers()


@command("train")
def main(config: DictConfig) -> float | None:
    """Train as configured; returns the simulated tau, for sweeps."""
    from eaglelab.training import train  # heavy imports after Hydra has answered --help and typos
    from eaglelab.training.loggers import finish_wandb

    require_multirun()
    quiet_libraries()
    try:
        result = train(config, config.run_dir, on_start=lambda: _record(config))
    finally:
        finish_wandb()
    if result.speaks:
        _tell(result)
    if result.interrupted:
        raise SystemExit(130)
    return result.figures["final"].get("val/tau")


def _record(config: DictConfig) -> None:
    """Write ``.hydra/``, as Hydra would; it writes before the job can refuse, over the record of a run that exists."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir) / ".hydra"
    folder.mkdir(parents=True, exist_ok=True)
    whole = OmegaConf.create({"hydra": settings})
    for name, content in (("config", config), ("hydra", whole), ("overrides", settings.overrides.task)):
        (folder / f"{name}.yaml").write_text(OmegaConf.to_yaml(content), encoding="utf-8")


def _tell(result: TrainingResult) -> None:
    folder, figures = result.folder.path, result.figures
    if result.interrupted:
        print(
            f"\ninterrupted at step {figures['optimizer_steps']}; nothing is lost. Continue with:\n"
            f"  eaglelab train {' '.join(HydraConfig.get().overrides.task)} hydra.run.dir={folder} ckpt_path=last",
            file=sys.stderr,
        )
        return
    tau = figures["final"].get("val/tau")
    tail = f", simulated tau {tau:.2f}" if tau is not None else ""
    print(f"\ntrained {figures['variant']}: {figures['optimizer_steps']} steps in {figures['seconds']:.0f} s{tail}")
    print(f"run folder: {folder}\nnext: eaglelab evaluate run={folder}")


if __name__ == "__main__":
    main()
