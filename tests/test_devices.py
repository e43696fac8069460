"""Everything in ``tests/devices``, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(600)
def test_the_pretended_device():
    command = [sys.executable, "-m", "pytest", str(HERE / "devices"), "-p", "no:cacheprovider", "--tb=short"]
    run = subprocess.run(
        command,
        cwd=HERE.parent,
        env=os.environ | {"EAGLELAB_PRETENDED_DEVICE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
