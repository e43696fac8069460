"""The main job from the outside: run folder, resuming, interrupting, loggers, several processes."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_dir

from eaglelab.cli.config import config_dir, register_resolvers
from eaglelab.training.job import train_once
from eaglelab.variants import DraftingModule
from tests.cli.conftest import SMALL, command, run, run_fresh


def weights(folder) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def assert_same_bits(one, other):
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].equal(second[name]), name


def test_a_run_folder_holds_what_every_other_verb_needs(trained):
    for name in (
        ".hydra/config.yaml",
        ".hydra/overrides.yaml",
        "manifest.json",
        "metrics.json",
        "checkpoints/last.ckpt",
    ):
        assert (trained / name).is_file(), name
    assert list((trained / "csv").rglob("metrics.csv"))
    training = json.loads((trained / "metrics.json").read_text())["training"]
    assert training["optimizer_steps"] == 8
    assert training["supervised_rows"] > 0
    assert 1 <= training["final"]["val/tau"] <= 6
    manifest = json.loads((trained / "manifest.json").read_text())
    assert manifest["variant"] == "eagle"
    assert manifest["taps"] == ["final"]
    assert manifest["switches"]["supervise"] == "advanced"
    checkpoint = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)  # plain data, no code
    assert checkpoint["manifest"] == manifest


def test_resumed_and_interrupted_training_equals_uninterrupted_bit_for_bit(tmp_path):
    """Ctrl-C in the middle of the second epoch, then ckpt_path=last, against one go. Same seed, same numbers."""
    job = [*SMALL, "trainer.max_steps=24", "trainer.log_every_n_steps=1", "logger=csv"]
    run("train", *job, "hydra.run.dir=whole", cwd=tmp_path)

    slow = [*job, "hydra.run.dir=cut", "callbacks.progress.refresh_seconds=0"]
    process = subprocess.Popen(
        command("train", *slow),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ),
    )
    seen = b""
    while b" 5/24" not in seen:
        piece = process.stderr.read1(4096)
        assert piece, seen.decode()
        seen += piece
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors.decode()
    assert b"ckpt_path=last" in errors
    cut = torch.load(tmp_path / "cut" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert 5 <= cut < 24

    run("train", *job, "hydra.run.dir=cut", "ckpt_path=last", cwd=tmp_path)
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")
    # the log of the first part is still there
    assert len(list((tmp_path / "cut" / "csv").rglob("metrics.csv"))) == 2


def test_killed_after_its_last_step_a_run_gets_its_figures(trained, tmp_path):
    """The checkpoint of the last step is there, the figures are not."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    job = [*SMALL, "trainer.max_steps=8", "hydra.run.dir=run", "ckpt_path=last"]
    run("train", *job, cwd=tmp_path)
    whole, late = (json.loads((at / "metrics.json").read_text())["training"] for at in (trained, tmp_path / "run"))
    validated = {name: value for name, value in whole["final"].items() if name.startswith("val/")}
    assert validated and validated.items() <= late["final"].items()
    for name in ("optimizer_steps", "supervised_rows", "interrupted"):
        assert late[name] == whole[name], name
    assert_same_bits(trained, tmp_path / "run")


def test_wandb_is_offline_for_those_who_are_not_logged_in(tmp_path):
    hidden = ("WANDB_MODE", "WANDB_API_KEY")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"NETRC": str(tmp_path / "none")}
    job = [*SMALL, "trainer.max_steps=2", "logger=wandb", "hydra.run.dir=run"]
    run_fresh("train", *job, cwd=tmp_path, env=environment)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("variant", [["hass", "variant.eagle_share=0"], ["eagle3"]])
def test_two_processes_give_the_gradients_of_one_with_the_doubled_batch(variant, tmp_path):
    """gloo; losses are normalised over the supervised rows of both processes, which differ.

    AdamW's first moment after one step is a tenth of the gradient; weights would show rounding magnified.
    """
    name, *settings = variant
    job = [*SMALL, f"variant={name}", *settings, "trainer.max_steps=1", "optim.name=adamw", "logger=none"]
    run_fresh(
        "train", *job, "data.batch_size=2", "trainer=ddp", "trainer.accelerator=cpu", "hydra.run.dir=two", cwd=tmp_path
    )
    run("train", *job, "data.batch_size=4", "hydra.run.dir=one", cwd=tmp_path)
    moments = []
    for folder in ("one", "two"):
        checkpoint = torch.load(tmp_path / folder / "checkpoints" / "last.ckpt", weights_only=True)
        moments.append([state["exp_avg"] for state in checkpoint["optimizer_states"][0]["state"].values()])
    assert len(moments[0]) >= 10
    for one, two in zip(*moments, strict=True):
        assert one.abs().max() > 0
        assert (one - two).abs().max() < 1e-5 * one.abs().max()


def losses(folder) -> list[float]:
    """The logged training loss of every step, sessions of a resumed run one after the other."""
    found = []
    for log in sorted((folder / "csv").rglob("metrics.csv")):
        with log.open(newline="") as file:
            found += [float(line["train/loss"]) for line in csv.DictReader(file) if line.get("train/loss")]
    return found


@pytest.mark.parametrize("variant", ["hass", "eagle3"])
def test_mixed_precision_trains_what_full_precision_does(variant, tmp_path):
    """bfloat16 has 8 bits of mantissa: losses of the first steps agree to about a hundredth, weights stay fp32."""
    job = [*SMALL, f"variant={variant}", "recipe=none", "trainer.max_steps=4", "trainer.log_every_n_steps=1"]
    job += ["variant.noise=none"] if variant != "eagle3" else []
    mixed = ["target.dtype=bfloat16", "trainer.precision=bf16-mixed", "hydra.run.dir=mixed"]
    said = run_fresh("train", *job, *mixed, "logger=csv", cwd=tmp_path)
    run("train", *job, "hydra.run.dir=full", "logger=csv", cwd=tmp_path)
    assert "Warning" not in said.stderr
    assert {value.dtype for value in weights(tmp_path / "mixed").values() if value.is_floating_point()} == {
        torch.float32
    }
    found = losses(tmp_path / "mixed")
    assert len(found) == 4
    assert found == pytest.approx(losses(tmp_path / "full"), rel=0.02)
    assert found != losses(tmp_path / "full")


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    """One process, two with all sharded, one again: the same global batches, so the same losses as in one go."""
    constant = ["optim.name=adamw", "optim.schedule=constant", "optim.warmup_steps=0", "variant.noise=none"]
    job = [*SMALL, *constant, "trainer.log_every_n_steps=1", "data.batch_size=4"]
    run("train", *job, "trainer.max_steps=9", "hydra.run.dir=whole", cwd=tmp_path)
    here = ["hydra.run.dir=moved", "ckpt_path=last"]
    two = ["trainer=fsdp", "trainer.accelerator=cpu", "data.batch_size=2", "trainer.max_steps=6"]
    run("train", *job, "trainer.max_steps=3", here[0], cwd=tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    started = [*torchrun, "-m", "eaglelab.cli.train", *job, *two, *here]
    done = subprocess.run(started, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained eagle") == 1  # two processes, one voice
    run("train", *job, "trainer.max_steps=9", *here, cwd=tmp_path)
    whole = losses(tmp_path / "whole")
    assert len(set(whole)) == len(whole) == 9
    assert losses(tmp_path / "moved") == pytest.approx(whole, rel=1e-4)
    other = run("train", *job, "data.batch_size=2", "trainer.max_steps=12", *here, cwd=tmp_path, check=False)
    assert other.returncode == 1
    assert "rows_per_batch is 2 here and 4 in the checkpoint" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["variant=egale"], "Could not find 'variant/egale'"),
        (["data.path=/nope"], "/nope: no such file"),
        (["data.paht=x"], "there is no setting data.paht"),
        (["target=hf", "target.source=/nope"], "/nope"),
        (["target=hf"], "Missing mandatory value: target.source"),
        (["optim.clip_value=1.0"], "clip_value or clip_norm, not both"),
        (["variant.noise=loud"], "noise law 'loud' is not one of"),
        (["variant.supervise=answer"], "supervise='answer' is not one of"),
        (["ckpt_path=last"], "no checkpoint at"),
        (["trainer.accelerator=abacus"], "invalid accelerator name"),
        (["target.dtype=bfloat16"], "add trainer.precision=bf16-mixed"),
        (["target=hf", "target.source=/nope", "trainer.precision=bf16-mixed"], "/nope"),
        (["trainer.precision=bf16-true"], "its weights stay fp32"),
        (["data.max_length=4", "data.row_length=4"], "no conversation is left"),
    ],
)
def test_bad_input_ends_in_one_message(arguments, message, tmp_path):
    done = run("train", *SMALL, *arguments, "hydra.run.dir=run", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_training_that_fails_gives_the_signals_back(tmp_path, monkeypatch):
    """Whoever calls the training from Python can be interrupted afterwards as before."""
    register_resolvers()
    with initialize_config_dir(config_dir(), version_base="1.3"):
        config = compose("train", [*SMALL, "variant=eagle", "recipe=eagle", "logger=none", f"run_dir={tmp_path}"])

    def broken(self, batch, number):
        raise ValueError("broken on purpose")

    monkeypatch.setattr(DraftingModule, "training_step", broken)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ValueError, match="broken on purpose"):
        train_once(config, tmp_path)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_finished_run_is_never_overwritten(trained):
    before = (trained / "manifest.json").read_bytes(), (trained / "checkpoints" / "last.ckpt").read_bytes()
    here = [f"hydra.run.dir={trained}"]
    again = run("train", *SMALL, *here, cwd=trained, check=False)
    assert again.returncode == 1
    assert "already holds a run" in again.stderr
    other = run("train", *SMALL, *here, "ckpt_path=last", "variant.noise=none", cwd=trained, check=False)
    assert other.returncode == 1
    assert "switches.noise was recorded as 'paper_uniform' but is 'none' here" in other.stderr
    after = (trained / "manifest.json").read_bytes(), (trained / "checkpoints" / "last.ckpt").read_bytes()
    assert after == before


def test_help_and_verbs(tmp_path):
    help_text = run("train", "--help", cwd=tmp_path).stdout
    assert "python train.py variant=eagle" in help_text
    assert "noise: paper_uniform" in help_text
    assert "evaluate" in run("--help", cwd=tmp_path).stdout
    wrong = run("trian", cwd=tmp_path, check=False)
    assert wrong.returncode == 2
    assert "unknown verb 'trian'" in wrong.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_step_saves_and_is_told(number, tmp_path, monkeypatch):
    """As a scheduler does before it kills: the step is finished and kept, and the code is not that of a whole run."""
    real = DraftingModule.training_step

    def struck(self, batch, place):
        if self.trainer.global_step == 1:
            os.kill(os.getpid(), number)
        return real(self, batch, place)

    monkeypatch.setattr(DraftingModule, "training_step", struck)
    done = run("train", *SMALL, "trainer.max_steps=4", "logger=none", "hydra.run.dir=run", cwd=tmp_path, check=False)
    assert done.returncode == 130, done.stderr
    assert "ckpt_path=last" in done.stderr
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2


def test_a_signal_in_the_last_step_ends_a_whole_run(tmp_path, monkeypatch):
    real = DraftingModule.training_step

    def struck(self, batch, place):
        if self.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, batch, place)

    monkeypatch.setattr(DraftingModule, "training_step", struck)
    done = run("train", *SMALL, "trainer.max_steps=4", "logger=none", "hydra.run.dir=run", cwd=tmp_path)
    assert "ckpt_path=last" not in done.stderr
    figures = json.loads((tmp_path / "run" / "metrics.json").read_text())["training"]
    assert (figures["optimizer_steps"], figures["interrupted"]) == (4, False)
    assert 1 <= figures["final"]["val/tau"] <= 6
