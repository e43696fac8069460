"""Training that is killed again and again ends with the bits of training that is not."""

import os
import random
import subprocess
import time

import pytest

from tests.cli.conftest import SMALL, command, run
from tests.cli.test_train import assert_same_bits

KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", ["hass", "eagle3"])
def test_training_survives_sigkill(variant, tmp_path):
    """At random moments: while starting, between checkpoints, while one is written."""
    job = [*SMALL, f"variant={variant}", "trainer.max_steps=200", "callbacks.last.every_n_steps=3"]
    run("train", *job, "hydra.run.dir=whole", cwd=tmp_path)
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    moments = random.Random(0)
    kills = stamps = 0
    seen = None
    while True:
        resume = ["ckpt_path=last"] if last.exists() else []
        process = subprocess.Popen(
            command("train", *job, "hydra.run.dir=cut", *resume),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(os.environ),
        )
        if kills == KILLS:
            _, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
            break
        time.sleep(moments.uniform(4, 12))
        if process.poll() is not None:  # finished before it could be killed
            break
        process.kill()
        process.wait()
        kills += 1
        stamp = last.stat().st_mtime_ns if last.exists() else None
        stamps += stamp != seen
        seen = stamp
    assert kills >= 3
    assert stamps >= 2  # killed while it was at work, more than once
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")
