"""`eaglelab compare`, `eaglelab diff` and `evaluate suite=` as a user runs them."""

import json
import os
import signal
import subprocess
import time

import pytest

from tests.cli.conftest import command, run
from tests.comparison.conftest import settings, tiny  # noqa: F401

CELLS = ("suites=[gsm8k]", "limit=2", "max_new_tokens=6", "temperatures=[0]", "batches=[1]", "resamples=100")


def asked(tiny, *more):  # noqa: F811
    overrides = ",".join(f'"{one}"' for one in settings(tiny))
    return (f"train=[{overrides}]", *CELLS, *more)


def test_a_comparison_from_the_command_line(tiny, tmp_path):  # noqa: F811
    job = asked(
        tiny, "variants=[eagle,hass]", "trees=[chain,dynamic]", "budget.unit=steps", "budget.value=2", "out=out"
    )
    done = run("compare", *job, cwd=tmp_path)
    for said in ("trainings", "gsm8k, 2 questions", "no difference shown", "what separates these runs", "top_weight"):
        assert said in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "written" not in line and "train:" not in line) <= 120
    for name in ("comparison.json", "results.json", "results.parquet", "report.html"):
        assert (tmp_path / "out" / name).is_file(), name
    runs = [str(tmp_path / "out" / "runs" / f"{name}-seed0") for name in ("eagle", "hass")]
    found = run("diff", *runs, "out=diff.json", cwd=tmp_path)
    assert "alignment" in found.stdout
    assert {one["section"] for one in json.loads((tmp_path / "diff.json").read_text())} >= {"contract"}
    same = run("diff", f"a={runs[0]}", f"b={runs[0]}/.", cwd=tmp_path, check=False)
    assert "is there twice" in same.stderr
    given = run(
        "compare", *CELLS, f"runs={{mine: {runs[0]}}}", "trees=[none]", "+shapes.none={name: none}", cwd=tmp_path
    )
    assert "mine" in given.stdout
    mt_bench = run(
        "evaluate", f"run={runs[0]}", "suite=mt_bench", "limit=2", "turns=all", "max_new_tokens=4", cwd=tmp_path
    )
    assert "roleplay" in mt_bench.stdout
    assert "4   " in mt_bench.stdout  # answers: two turns of two questions


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("compare", ["trees=[chains]"], "trees: 'chains' is not one of chain, static, dynamic"),
        ("compare", ["variants=[medusa]"], "'medusa' is not one of"),
        ("compare", ["budget.unit=hours"], "budget.unit='hours'"),
        ("compare", ["suites=[gsm9k]", "out=o"], "no suite and no file is called"),
        ("compare", ["runs={a: /nope}"], "run=/nope does not exist"),
        ("compare", ["variants=[eagle]", "runs={eagle: /nope}"], "eagle is a variant and a given run"),
        ("compare", ["train=['nothing=3']", "out=o"], "nothing"),
        ("compare", ["budget=90"], "budget=90 is not understood; write budget.value=90"),
        ("compare", ["runs=/nope"], "runs=/nope is not understood"),
        ("compare", ["budget.value=many"], "budget.value: 'many' is no number"),
        ("diff", [], "two runs, 0 given"),
        ("diff", ["/nope", "/neither"], "run=/nope does not exist"),
    ],
)
def test_bad_input_ends_in_one_message(verb, arguments, message, tmp_path):
    done = run(verb, *arguments, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_two_names_of_prompts_are_refused(trained, tmp_path):
    done = run("evaluate", f"run={trained}", "suite=qa", "data.path=x.jsonl", cwd=tmp_path, check=False)
    assert "suite=qa and data.path=x.jsonl both name prompts" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_and_interrupted_comparisons_go_on(tiny, tmp_path):  # noqa: F811
    """SIGKILL in a training, Ctrl-C in the next one, SIGKILL among the cells; then the numbers of one go."""
    job = asked(tiny, "variants=[eagle,hass]", "trees=[chain,static,dynamic]", "budget.unit=steps", "budget.value=40")
    started = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": dict(os.environ)}
    stops = [
        ("runs/eagle-seed0/csv/version_0/metrics.csv", signal.SIGKILL),
        ("runs/hass-seed0/csv/version_0/metrics.csv", signal.SIGINT),
        ("cells/*/cell.json", signal.SIGKILL),
    ]
    for pattern, number in stops:
        process = subprocess.Popen(command("compare", *job, "out=cut"), **started)
        while not list((tmp_path / "cut").glob(pattern)) and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert b"Continue with the same command" in errors
    for out in ("cut", "whole"):
        subprocess.run(command("compare", *job, f"out={out}"), cwd=tmp_path, check=True, capture_output=True)
    cut, whole = (json.loads((tmp_path / out / "results.json").read_text()) for out in ("cut", "whole"))
    key = ("name", "tree", "tau", "acceptance_cumulative", "rounds", "train_simulated_tau", "train_supervised_rows")
    assert [[row[k] for k in key] for row in cut["rows"]] == [[row[k] for k in key] for row in whole["rows"]]
