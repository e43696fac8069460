"""The script for a machine with a GPU, tried out on small shapes on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "experiments" / "gpu" / "run.sh"


def run(*arguments):
    settings = os.environ | {"DEVICE": "cpu", "PYTHON": sys.executable}
    return subprocess.run(["sh", SCRIPT, *arguments], capture_output=True, text=True, env=settings)


def test_it_tells_how_it_is_called():
    done = run()
    assert done.returncode == 2 and "OUT [STAGE ...]" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_stage_runs_and_leaves_its_figures(tmp_path):
    done = run(tmp_path / "out")
    assert done.returncode == 0, done.stdout[-5000:]
    summary = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert len(summary) == 21 and all(": exit 0 " in line for line in summary if "not tried on a CPU" not in line)
    for name in ("kernels", "steps", "steps-torch", "steps-all-rows", "rounds-1b", "rounds-8b"):
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert run(tmp_path / "out", "oak").returncode == 2
