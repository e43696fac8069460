"""`eaglelab doctor` on a run folder, a published checkpoint and wrong input."""

import json

import pytest

from tests.cli.conftest import run

SHORT = ("limit=2", "max_new_tokens=12", "depth=3")


def test_a_run_is_examined(trained, tmp_path):
    done = run("doctor", f"run={trained}", *SHORT, "out=told.json", cwd=tmp_path)
    assert "2 answers of the target, 24 tokens, chain of 3" in done.stdout
    assert "diagnosis: no wiring fits" in done.stdout  # eight steps of training
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["verdict"] == "no_wiring_fits"
    assert {"declared", "token_late", "fc_swapped"} <= {one["name"] for one in told["findings"]}
    assert all(1 <= one["tau"] <= 4 for one in told["findings"])


def test_a_published_checkpoint_is_examined(trained, tmp_path):
    run("export", f"run={trained}", "format=eagle", "out=out", cwd=tmp_path)
    (tmp_path / "out" / "eaglelab.json").unlink()  # as if someone else had written it
    done = run("doctor", "source=out", "target.source=bundled", *SHORT, cwd=tmp_path)
    assert "out: taps final" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of run=DIR and source="),
        (["run={trained}", "source=x"], "give one of run=DIR and source="),
        (["run=/nope"], "run=/nope does not exist"),
        (["source=/nope", "target.source=bundled"], "/nope"),
        (["source=/nope"], "needs target.source="),
        (["run={trained}", "limit=1"], "limit=1: two conversations"),
        (["run={trained}", "depth=0"], "depth=0: the chain needs at least one step"),
        (["run={trained}", "depth=5", "max_new_tokens=4", "limit=2"], "no answer is longer than 5 tokens"),
    ],
)
def test_bad_input_ends_in_one_message(arguments, message, trained, tmp_path):
    done = run("doctor", *(one.format(trained=trained) for one in arguments), cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
