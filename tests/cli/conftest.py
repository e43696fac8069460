"""Run the command line as a user does: a fresh process in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["data.limit=48", "data.val_limit=8", "data.batch_size=2", "trainer.val_check_interval=4"]


def command(verb: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "eaglelab.cli.main", verb, *arguments]


def run(verb: str, *arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(command(verb, *arguments), cwd=cwd, capture_output=True, text=True, env=dict(os.environ))
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A run folder of a few steps on the bundled target and data."""
    folder = tmp_path_factory.mktemp("cli")
    run("train", *SMALL, "trainer.max_steps=8", "hydra.run.dir=run", cwd=folder)
    return folder / "run"
