"""SIGKILL at random moments of real processes: caching, and training from a store."""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from eaglelab.cli.main import main
from eaglelab.features.store import FeatureStore
from eaglelab.training import caching, read_checkpoint  # caching: imported before the processes are forked
from tests.features.conftest import contents_of

assert caching
CACHE = ["variant=eagle3", "dtype=int8", "data.limit=60", "data.val_limit=6", "shard_mib=0.25", "batch_tokens=512"]
TRAIN = [
    "variant=hass",
    "trainer.max_steps=40",
    "trainer.val_check_interval=20",
    "callbacks.last.every_n_steps=3",
    "features=store",
    "callbacks.progress=null",
    "data.batch_size=1",
]


def job(arguments: list[str], folder: str) -> None:
    """A command in a process of its own."""
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = ["eaglelab"]
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        main(arguments)


def start(folder: Path, *arguments: str) -> BaseProcess:
    """Forked from a server that has done the imports, so that kills are not spent on them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.features.test_kill"])
    process = context.Process(target=job, args=(list(arguments), str(folder)))
    process.start()
    return process


def finish(folder: Path, *arguments: str) -> None:
    process = start(folder, *arguments)
    process.join()
    assert process.exitcode == 0


def killed(process: BaseProcess, began, seconds: float) -> bool:
    """Kill ``seconds`` after ``began()`` is first true; false if it ended by itself."""
    while process.is_alive() and not began():
        time.sleep(0.005)
    process.join(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_of_caching_lose_at_most_the_unfinished_shard(tmp_path):
    finish(tmp_path, "cache", *CACHE, "out=whole")
    whole = contents_of(tmp_path / "whole")
    chance, kills, stores, leftovers = random.Random(0), 0, 0, 0
    while kills < 20:
        out = tmp_path / f"out-{stores}"
        while True:  # one store, killed again and again until it is finished
            before = names(out)
            process = start(tmp_path, "cache", *CACHE, f"out={out.name}")
            cut = killed(process, lambda: names(out) != before, chance.uniform(0, 3.0))  # noqa: B023
            kills += cut
            leftovers += any(name.endswith(".unfinished") for name in names(out))
            assert {name for name in before if name.endswith(".xxh128")} <= names(out)
            if not cut:
                break
        FeatureStore(out).check_all()
        assert contents_of(out) == whole, f"after {kills} kills"
        stores += 1
    print(f"{kills} kills over {stores} stores of {len(whole)} files, {leftovers} in the middle of a file")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_training_from_a_store_is_killed_and_ends_as_uninterrupted(tmp_path):
    finish(tmp_path, "cache", *CACHE, "dtype=bfloat16", "out=store")
    stored = contents_of(tmp_path / "store")
    arguments = ["train", *TRAIN, "features.path=store"]
    finish(tmp_path, *arguments, "hydra.run.dir=whole")
    last, chance, kills = tmp_path / "run" / "checkpoints" / "last.ckpt", random.Random(1), 0
    while True:
        resumed = ["ckpt_path=last"] if last.exists() else []
        stamp = last.stat().st_mtime_ns if resumed else 0
        process = start(tmp_path, *arguments, "hydra.run.dir=run", *resumed)
        if not killed(process, lambda: last.exists() and last.stat().st_mtime_ns != stamp, chance.uniform(0, 2.0)):  # noqa: B023
            break
        kills += 1
    assert kills >= 2
    one, two = (read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("whole", "run"))
    assert one["global_step"] == two["global_step"] == 40
    for name, tensor in one["state_dict"].items():
        assert torch.equal(tensor, two["state_dict"][name]), name
    assert one["progress"].items() - two["progress"].items() <= {("seconds", one["progress"]["seconds"])}
    assert contents_of(tmp_path / "store") == stored
    print(f"{kills} kills of training")
