"""Settings against the configuration files: a word for a number, a number for a switch, nothing where one is needed."""

from __future__ import annotations

import difflib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from eaglelab.cli.compose import compose_config

if TYPE_CHECKING:
    import torch

FRACTIONS = {
    "answers", "clip_norm", "clip_value", "conversation_tokens", "data_tokens", "device_gib", "eagle_share",
    "rms_norm_eps",
}  # fmt: skip
"""Settings whose default is null and whose values are numbers."""
WHOLE = {
    "draft_vocab_size", "head_dim", "hidden_size", "intermediate_size", "limit", "max_position_embeddings",
    "max_positions", "num_attention_heads", "num_heads", "num_key_value_heads", "num_kv_heads", "num_layers",
    "row_length", "rows", "top_k", "total_steps", "val_limit", "vocab_size",
}  # fmt: skip
"""Settings whose default is null and whose values are whole numbers."""
LISTS = {"betas", "budgets", "floors", "ids", "paths", "pass_weights", "stages", "taps", "trust", "widths"}
"""Settings whose default may be null and whose values are lists, or the file that holds one."""
SHARES = {"warmup_steps", "timeout"}
"""Settings whose default is a whole number and whose values need not be."""
OTHERS_CHECK = ("hydra.", "trainer.devices", "trainer.val_check_interval", "budget.value")
"""Read by Lightning and Hydra, which say themselves what they take, or of several forms."""


def check_settings(config: DictConfig, config_name: str, missing_allowed: bool) -> None:
    """Compare what was asked for with the defaults of the same groups.

    Raises:
        ValueError: a value of another kind than the default's, or a mandatory one missing.
    """
    settings = HydraConfig.get()
    choices = settings.runtime.choices
    given = [one.lstrip("+") for one in settings.overrides.task if not one.startswith("~")]
    groups = [one for one in settings.overrides.task if one.lstrip("+~").partition("=")[0] in choices]
    names = [name for name, equals, _ in (one.partition("=") for one in given) if equals and name not in choices]
    names = [name for name in names if not name.startswith(OTHERS_CHECK)]
    if names:
        defaults = compose_config(config_name, groups)
        for name in names:
            _check(name, OmegaConf.select(defaults, name), OmegaConf.select(config, name))
    missing = sorted(OmegaConf.missing_keys(config))
    if missing and not missing_allowed:
        verb = config_name.replace("_", " ")
        raise ValueError(
            f"Missing mandatory value: {missing[0]}; give {missing[0]}=..., `eaglelab {verb} --help` says what it is"
        )


def writable(path: str) -> Path:
    """The path of a file to be written at the end; checked before hours of work, its folder is made.

    Raises:
        ValueError: it is a folder, or its own cannot be made or written to.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out={path} cannot be written ({error.strerror}); choose another file") from None
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        what = "is a folder" if file.is_dir() else "may not be written"
        raise ValueError(f"out={path} {what}; choose another file")
    return file


def measured_device(name: str) -> tuple[torch.device, str]:
    """The device of ``device=name``, and what it is called beside figures.

    Raises:
        ValueError: neither cpu nor cuda, or no GPU.
    """
    import torch

    if name not in ("cpu", "cuda"):
        raise ValueError(f"device={name}: use cpu or cuda")
    if name == "cpu":
        return torch.device("cpu"), f"{torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        raise ValueError("device=cuda: no GPU is found here; use cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.cuda.get_device_name(device)


def settings_like(name: str, config_name: str) -> str | None:
    """The setting or group that a mistyped one was meant to be; None: nothing is near."""
    known = list(_leaves(compose_config(config_name, [])))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if not near and "." not in name:
        near = [one for one in known if one.rpartition(".")[2] == name][:1]
    return near[0] if near else None


def _check(name: str, default: Any, value: Any) -> None:
    if value is None:
        return
    word = name.rpartition(".")[2]
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value} is no switch; use true or false")
    elif isinstance(default, int | float) or (default is None and word in FRACTIONS | WHOLE):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}={value} is no number; its default is {'null' if default is None else default}")
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} cannot be used; give a finite number")
        whole = word in WHOLE if default is None else isinstance(default, int) and word not in SHARES
        if whole and not isinstance(value, int):
            raise ValueError(f"{name}={value} must be a whole number")
    elif word in LISTS and isinstance(value, int | float | bool):
        raise ValueError(f"{name}={value} must be a list, such as {name}=[{value}]")


def _leaves(config: DictConfig, prefix: str = "") -> list[str]:
    """Names of all settings, those of groups included."""
    names: list[str] = []
    for key in map(str, config):
        name = f"{prefix}{key}"
        names.append(name)
        if not OmegaConf.is_missing(config, key) and not OmegaConf.is_interpolation(config, key):
            value = config[key]
            if isinstance(value, DictConfig):
                names += _leaves(value, f"{name}.")
    return names
