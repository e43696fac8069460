"""Recipes of several stages, and starting from another run's weights."""

import json
import shutil

import torch

from tests.cli.conftest import SMALL, run
from tests.cli.test_train import assert_same_bits, weights

STAGES = "stages=[{trainer: {max_steps: 4}, variant: {top_weight: 0.0}}, {trainer: {max_steps: 3}, optim: {lr: 1e-5}}]"


def test_two_stages_are_one_command_and_resume_between_them(tmp_path):
    job = [*SMALL, "variant=hass", STAGES, "hydra.run.dir=run"]
    run("train", *job, cwd=tmp_path)
    folder, first = tmp_path / "run", tmp_path / "run" / "stage-1"
    assert json.loads((first / "manifest.json").read_text())["switches"]["top_weight"] == 0.0
    assert json.loads((folder / "manifest.json").read_text())["switches"]["top_weight"] == 1.0
    training = json.loads((folder / "metrics.json").read_text())["training"]
    assert training["optimizer_steps"] == 3
    assert training["init_from"] == str(first / "checkpoints" / "last.ckpt")
    # three steps at lr 1e-5 stay close to the first stage's weights, and do move
    moved = [(a - b).abs().max() for a, b in zip(weights(folder).values(), weights(first).values(), strict=True)]
    assert 0 < max(moved) < 1e-4

    # cut short after the first stage: only the second one is trained again, to the same bits
    whole = shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(folder / "checkpoints")
    before = (first / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    run("train", *job, "ckpt_path=last", cwd=tmp_path)
    assert (first / "checkpoints" / "last.ckpt").stat().st_mtime_ns == before
    assert_same_bits(whole, folder)


def test_hass_from_eagle_and_refusal_of_another_drafter(trained, tmp_path):
    job = [*SMALL, "variant=hass", "trainer.max_steps=1", "optim.lr=1e-9", f"init_from={trained}"]
    run("train", *job, "hydra.run.dir=hass", cwd=tmp_path)
    for name, weight in weights(tmp_path / "hass").items():
        torch.testing.assert_close(weight, weights(trained)[name], rtol=0, atol=1e-7)

    other = run("train", *job, "variant.drafter.fc_bias=false", "hydra.run.dir=other", cwd=tmp_path, check=False)
    assert other.returncode == 1
    assert "does not fit: field drafter.fc_bias was recorded as True but is False here" in other.stderr
    missing = run("train", *SMALL, "init_from=/nope", "hydra.run.dir=third", cwd=tmp_path, check=False)
    assert missing.returncode == 1
    assert "/nope" in missing.stderr
