"""Where the configuration files are, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

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
    """``${eaglelab.bundled_data:train}``: the path of a bundled file, wherever the package is installed."""
    from eaglelab.assets import bundled_data

    OmegaConf.register_new_resolver("eaglelab.bundled_data", bundled_data, replace=True)
