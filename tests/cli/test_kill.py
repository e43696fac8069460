"""Training that is killed again and again ends with the bits of training that is not."""

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import SMALL, command, run
from tests.cli.test_train import assert_same_bits

KILLS = 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", ["hass", "eagle3"])
def test_training_survives_sigkill(variant, tmp_path):
    """At random moments: while starting, between checkpoints, while one is written."""
    job = [*SMALL, f"variant={variant}", "trainer.max_steps=400", "callbacks.last.every_n_steps=3"]
    run("train", *job, "hydra.run.dir=whole", cwd=tmp_path)
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    moments, kills = random.Random(0), 0
    while kills < KILLS:
        before = stamp(last)
        resume = ["ckpt_path=last"] if before else []
        process = subprocess.Popen(
            command("train", *job, "hydra.run.dir=cut", *resume),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(os.environ),
        )
        if kills % 2:  # while it starts
            time.sleep(moments.uniform(0, 8))
        else:  # some time after its first checkpoint
            while stamp(last) == before and process.poll() is None:
                time.sleep(0.02)
            time.sleep(moments.uniform(0, 1))
        assert process.poll() is None, "it ended by itself"
        process.kill()
        process.wait()
        kills += 1
    run("train", *job, "hydra.run.dir=cut", *(["ckpt_path=last"] if stamp(last) else []), cwd=tmp_path)
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")


def stamp(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None
