"""Errors as a person at a terminal wants them: what, where, the way out; no stack."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

Result = TypeVar("Result")


def friendly(job: Callable[..., Result]) -> Callable[..., Result]:
    """Turn a job's expected errors into one line on stderr and exit code 1.

    Expected are ValueError, OSError and what Hydra, OmegaConf or Lightning say about a configuration.
    ``HYDRA_FULL_ERROR=1`` shows the stack, as does anything unexpected.
    """

    @functools.wraps(job)
    def run(*args: object, **kwargs: object) -> Result:
        try:
            return job(*args, **kwargs)
        except Exception as error:
            cause: BaseException = error
            while isinstance(cause, HydraException) and cause.__cause__ is not None:  # instantiate() wraps
                cause = cause.__cause__
            if not _expected(cause) or os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            print(f"error: {cause}", file=sys.stderr)
            raise SystemExit(1) from None

    return run


def _expected(error: BaseException) -> bool:
    # by name: importing Lightning here would slow down every --help
    misconfigured = type(error).__name__ == "MisconfigurationException"
    return misconfigured or isinstance(error, ValueError | OSError | HydraException | OmegaConfBaseException)
