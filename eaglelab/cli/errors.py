"""Errors as a person at a terminal wants them: what, where, the way out; no stack."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from eaglelab.cli.checks import check_settings, settings_like
from eaglelab.cli.config import config_dir

Job = Callable[[DictConfig], Any]
STACK = "HYDRA_FULL_ERROR"


def command(config_name: str, *, missing_allowed: bool = False) -> Callable[[Job], Callable[[], None]]:
    """Make a function of a composed configuration a command: Hydra's, with errors of one line and exit code 1.

    Expected errors are ValueError, OSError and what Hydra, OmegaConf or Lightning say about a configuration.
    ``HYDRA_FULL_ERROR=1`` shows the stack, as does anything unexpected. A run folder in which nothing was started is
    removed again.

    Args:
        config_name: of the file in ``configs/``.
        missing_allowed: the job itself says which of the mandatory settings it lacks.
    """

    def decorate(job: Job) -> Callable[[], None]:
        stack = False  # whether the user asked for it
        began = False

        @functools.wraps(job)  # Hydra names the job after its file
        def run(config: DictConfig) -> Any:
            nonlocal began
            began = True
            _hydra_prints(stack)
            try:
                check_settings(config, config_name, missing_allowed)
                return job(config)
            except Exception as error:
                _remove_unused_folder()
                cause: BaseException = error
                while isinstance(cause, HydraException) and cause.__cause__ is not None:  # instantiate() wraps
                    cause = cause.__cause__
                told = _unknown_setting(cause) or _disk_full(error) or (_one_line(cause) if _expected(cause) else "")
                if not told or stack:
                    raise
                print(f"error: {told}", file=sys.stderr)
                raise SystemExit(1) from None

        hydrated = hydra.main(version_base="1.3", config_path=config_dir(), config_name=config_name)(run)

        @functools.wraps(job)
        def main() -> None:
            nonlocal stack, began
            stack, began = os.environ.get(STACK) == "1", False
            _hydra_prints(True)  # that is, it raises what is wrong with the settings
            try:
                hydrated()
            except (HydraException, OmegaConfBaseException, OSError) as error:
                if began or stack:
                    raise
                print(f"error: {_composition(error, config_name)}", file=sys.stderr)
                raise SystemExit(1) from None
            finally:
                _hydra_prints(stack)

        return main

    return decorate


def _hydra_prints(stack: bool) -> None:
    if stack:
        os.environ[STACK] = "1"
    else:
        os.environ.pop(STACK, None)


def _expected(error: BaseException) -> bool:
    # by name: importing Lightning here would slow down every --help
    misconfigured = type(error).__name__ == "MisconfigurationException"
    return misconfigured or isinstance(error, ValueError | OSError | HydraException | OmegaConfBaseException)


def _unknown_setting(error: BaseException) -> str:
    """A setting that was added with + and that nothing takes; empty for other errors."""
    name = str(error).rpartition("unexpected keyword argument '")[2].rstrip("'")
    for one in HydraConfig.get().overrides.task:
        key = one.lstrip("+").partition("=")[0]
        if isinstance(error, TypeError) and one.startswith("+") and key.rpartition(".")[2] == name:
            return f"there is no setting {key}; leave it out, or write its name as the documentation does"
    return ""


def _disk_full(error: BaseException | None) -> str:
    """Whether no more could be written, told by the system or by the libraries that write weights; else empty."""
    while error is not None:
        text = str(error)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        if full or any(sign in text for sign in _UNWRITTEN):
            where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
            return f"{where}the disk is full, or no more may be written to it; free some space, or choose another place"
        error = error.__cause__ or error.__context__
    return ""


_UNWRITTEN = ("PytorchStreamWriter failed writing file", "No space left on device", "File too large", "unexpected pos")


def _one_line(error: BaseException) -> str:
    """The cause alone."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}; choose another path"
    if not isinstance(error, OmegaConfBaseException):
        return str(error)
    return _joined(str(error))


def _joined(text: str) -> str:
    """One line; OmegaConf's details, the key once more and the type around it, stay out."""
    lines = (line.strip() for line in text.splitlines())
    return " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=")))


def _composition(error: Exception, config_name: str) -> str:
    """One line about settings that do not compose."""
    text, verb = str(error), config_name.replace("_", " ")
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"the run's folder cannot be made ({text}); choose another hydra.run.dir"
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the setting {error.override!r}; write key=value, and in quotes of its own what holds spaces "
            "or any of , : = [ ] { } (key='\"a b\"')"
        )
    if text.startswith("Could not override"):
        name = text.split("'")[1]
        like = settings_like(name, config_name)
        hint = f"did you mean {like}? " if like else ""
        return f"there is no setting {name}; {hint}`eaglelab {verb} --help` lists them"
    cause = error.__cause__
    details = f"\n{cause}" if isinstance(cause, OmegaConfBaseException) else ""
    told = _joined((text + details).partition("Config search path")[0])
    head, _, options = told.partition("Available options in ")
    return f"{head.strip()}; available: {options.partition(':')[2].strip()}" if options else head


def _remove_unused_folder() -> None:
    """Take back the folder that Hydra made for a run, if the job left nothing in it but Hydra's log."""
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir)
    here = Path.cwd()
    if settings.runtime.choices.get("trainer") is None or not folder.is_dir() or folder in here.parents:
        return  # only a training has a folder of its own
    log = folder / f"{settings.job.name}.log"
    if folder == here or any(one != log for one in folder.iterdir()):
        return
    log.unlink(missing_ok=True)
    folder.rmdir()
    for parent in folder.parents:
        if here not in parent.parents or any(parent.iterdir()):
            break
        parent.rmdir()
