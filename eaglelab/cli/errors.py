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

    Expected are ValueError, OSError and what Hydra or OmegaConf raise. ``HYDRA_FULL_ERROR=1`` shows the stack,
    as does anything unexpected.
    """

    @functools.wraps(job)
    def run(*args: object, **kwargs: object) -> Result:
        try:
            return job(*args, **kwargs)
        except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            cause = error
            while isinstance(cause, HydraException) and cause.__cause__ is not None:  # instantiate() wraps
                cause = cause.__cause__  # type: ignore[assignment]
            print(f"error: {cause}", file=sys.stderr)
            raise SystemExit(1) from None

    return run
