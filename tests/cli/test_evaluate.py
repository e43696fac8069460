"""`eaglelab evaluate` on a run folder."""

import json
import shutil

import pytest
import torch

from eaglelab.training import RunFolder
from tests.cli.conftest import run


@pytest.mark.parametrize("tree", ["chain", "static", "none"])
def test_evaluate_writes_metrics_and_prints_the_table(tree, trained, tmp_path):
    done = run("evaluate", f"run={trained}", f"tree={tree}", "limit=3", "max_new_tokens=24", cwd=tmp_path)
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["identical"] == {"count": 3, "of": 3}
    assert metrics["tau"] >= 1
    if tree == "none":
        assert metrics["tau"] == 1
    for name in (
        "tokens_per_s",
        "baseline_tokens_per_s",
        "speedup",
        "rounds",
        "accepted_by_depth",
        "settings",
        "versions",
    ):
        assert name in metrics, name
    assert metrics["training"]["optimizer_steps"] == 8  # evaluating keeps what training wrote
    records = json.loads((trained / metrics["per_prompt_file"]).read_text())["per_prompt"]
    accepted = [count for record in records for count in record["accepted"]]
    assert metrics["tau"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert "tau" in done.stdout
    assert "3 of 3" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_sampling_in_batches_with_telemetry(trained, tmp_path):
    settings = ("tree=dynamic", "temperature=0.8", "top_p=0.9", "seed=3", "limit=5", "max_new_tokens=24", "batch=2")
    done = run("evaluate", f"run={trained}", *settings, "telemetry=rounds.jsonl", cwd=tmp_path)
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["identical"] == {"count": 5, "of": 5}, "a deterministic tree gives plain sampling's text"
    assert "T 0.8, batch 2" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(records) == metrics["rounds"]
    assert metrics["tau"] == pytest.approx(1 + sum(record["accepted"] for record in records) / len(records))
    assert metrics["telemetry"]["calibration"]["nodes"] == sum(len(record["confidence"]) for record in records)
    assert {record["batch"] for record in records} <= {1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run"),
        (["run=/nope"], "run=/nope does not exist"),
        (["run={trained}", "checkpoint=/nope.ckpt"], "no checkpoint at /nope.ckpt"),
        (["run={trained}", "data.path=/nope"], "/nope"),
        (["run={trained}", "tree=dynamics"], "Could not find 'tree/dynamics'"),
        (["run={trained}", "tree.depth=0"], "tree.depth=0"),
        (["run={trained}", "temperature=-1"], "temperature=-1"),
        (["run={trained}", "top_p=0"], "top_p=0"),
        (["run={trained}", "batch=0"], "batch=0"),
        (["run={trained}", "tree=dynamic", "tree.budget=0"], "tree.budget=0"),
        (["run={trained}", "telemetry=rounds.csv"], "rounds.csv"),
        (["run={trained}", "dtype=float33"], "float33"),
    ],
)
def test_bad_input_ends_in_one_message(arguments, message, trained, tmp_path):
    arguments = [a.format(trained=trained) for a in arguments]
    done = run("evaluate", *arguments, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_checkpoint_is_named(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "run")
    last = copy / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    done = run("evaluate", f"run={copy}", "limit=1", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "last.ckpt cannot be read as a checkpoint" in done.stderr


def test_a_target_that_does_not_fit_is_refused(trained, tmp_path):
    """Another width: the fingerprint differs before any weight is loaded."""
    from tests.variants.conftest import tiny_target

    tiny_target().model.save_pretrained(tmp_path / "other")
    done = run(
        "evaluate", f"run={trained}", f"target.source={tmp_path / 'other'}", "limit=1", cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert "holds a drafter of another target: field target" in done.stderr
    assert "Way out" in done.stderr


def test_a_checkpoint_without_a_tensor_is_refused(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "run")
    last = copy / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    del checkpoint["state_dict"]["network.fc.weight"]
    torch.save(checkpoint, last)
    folder = RunFolder.existing(copy)
    with pytest.raises(ValueError, match="does not hold this drafter(?s:.*)fc.weight"):
        folder.load_drafter(folder.load_target())
