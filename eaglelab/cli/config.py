"""Where the configuration files are, in a checkout and in an installed wheel."""

from __future__ import annotations

import hashlib
import os
import re
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

import eaglelab


def config_dir() -> str:
    """The folder ``configs/``: inside the package when installed, beside it in a checkout.

    Raises:
        FileNotFoundError: neither exists; the installation is damaged.
    """
    package = Path(eaglelab.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return str(folder)
    raise FileNotFoundError(f"no configs beside or inside {package}; reinstall eaglelab")


def register_resolvers() -> None:
    """What configuration files may ask for.

    ``${eaglelab.bundled_data:train}``: the path of a bundled file, wherever the package is installed.
    ``${eaglelab.target_dtype:bf16-mixed}``: the target's type for a precision of the drafter.
    ``${eaglelab.started:%H-%M-%S}``: when the job began, the same on all processes that torchrun started here.
    ``${eaglelab.folder_name:TEXT}``: the text as a folder's name that needs no quotes in a shell or an override.
    """
    from eaglelab.assets import bundled_data

    OmegaConf.register_new_resolver("eaglelab.bundled_data", bundled_data, replace=True)
    OmegaConf.register_new_resolver("eaglelab.target_dtype", _target_dtype, replace=True)
    OmegaConf.register_new_resolver("eaglelab.started", _started, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("eaglelab.folder_name", _folder_name, replace=True)


def require_multirun() -> None:
    """A grid was chosen with ``sweep=``, so Hydra must have been asked to run it.

    Raises:
        ValueError: it was not; a single point would run, and not even one of the grid's.
    """
    hydra = HydraConfig.get()
    name = hydra.runtime.choices.get("sweep")
    if name is not None and hydra.mode != RunMode.MULTIRUN:
        raise ValueError(f"sweep={name} is a grid of runs; add -m to run it, or leave sweep= out")


def _target_dtype(precision: str) -> str:
    return {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(str(precision), "float32")


def _started(form: str) -> str:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return time.strftime(form)
    import psutil

    return time.strftime(form, time.localtime(psutil.Process(os.getppid()).create_time()))


def _folder_name(text: str) -> str:
    name = re.sub(r"[^\w.+]*[^\w.+-][^\w.+]*", "-", text).replace("-_", "_").rstrip("-")
    return name if len(name) <= 200 else f"{name[:190]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
