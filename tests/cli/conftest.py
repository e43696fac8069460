"""Run the command line as a user does, in an empty folder: in this process, or in a fresh one where that matters."""

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eaglelab.cli.main import main

SMALL = ["data.limit=48", "data.val_limit=8", "data.batch_size=2", "trainer.val_check_interval=4"]


def command(verb: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "eaglelab.cli.main", verb, *arguments]


def run_fresh(
    verb: str, *arguments: str, cwd: Path, check: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """In a process of its own: what signals, further processes, imports or environment variables decide."""
    job = command(verb, *arguments)
    done = subprocess.run(job, cwd=cwd, capture_output=True, text=True, env=env or dict(os.environ))
    return _checked(done, check)


def run(verb: str, *arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess:
    """The same in this process, which saves the seconds that the imports take."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with as_if_alone(), contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([verb, *arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return _checked(subprocess.CompletedProcess([verb, *arguments], code, out.getvalue(), err.getvalue()), check)


def _checked(done: subprocess.CompletedProcess, check: bool) -> subprocess.CompletedProcess:
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """Give back what a command changes for its whole process."""
    argv, module, environment = sys.argv, sys.modules["__main__"], dict(os.environ)
    spec, root = getattr(module, "__spec__", None), logging.getLogger()
    handlers, level, random = list(root.handlers), root.level, torch.get_rng_state()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.argv, module.__spec__ = argv, spec
        os.environ.clear()
        os.environ.update(environment)
        root.handlers[:] = handlers
        root.setLevel(level)
        torch.set_rng_state(random)
        for number, handler in signals.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A run folder of a few steps on the bundled target and data."""
    folder = tmp_path_factory.mktemp("cli")
    run_fresh("train", *SMALL, "trainer.max_steps=8", "hydra.run.dir=run", cwd=folder)
    return folder / "run"
