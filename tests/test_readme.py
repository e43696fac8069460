"""The README's commands run as they stand, on a budget of seconds."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = {
    "train": ["data.limit=48", "data.val_limit=8", "trainer.max_steps=2", "trainer.val_check_interval=2"],
    "evaluate": ["limit=1", "max_new_tokens=8"],
    "generate": ["max_new_tokens=8"],
    "cache": ["data.limit=48", "data.val_limit=8"],
    "doctor": ["limit=2", "max_new_tokens=8"],
    "report": [],
    "export": [],
    "import": [],
    "compare": [
        "train=['data.limit=48', 'data.val_limit=4']",
        "budget={unit: steps, value: 2}",
        "limit=1",
        "max_new_tokens=4",
        "trees=[chain]",
        "temperatures=[0]",
        "batches=[1]",
    ],
    "diff": [],
    "tune": ["limit=1", "measure=1", "max_new_tokens=8", "repetitions=1", "widths=[1,2]", "depth=2", "budgets=[4]"],
    "bench decoding": ["limit=1", "max_new_tokens=4", "repetitions=1", "batch.prompts=0"],
    "bench": ["variants=[eagle]", "shape.length=64", "shape.batch=1", "steps=1"],
}


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]


def test_newcomers_need_two_commands():
    assert ["make", "demo"] in commands()
    assert ["make", "test"] in commands()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for command in commands():
        if command[0] == "make":
            assert command[1] in targets, command


def test_commands_run(tmp_path):
    """Every train, evaluate and generate line, in order, in one empty folder, after what `make demo` leaves."""
    ours = [c for c in commands() if c[0] in ("python", "eaglelab")]
    assert {"train", "evaluate", "generate"} <= {"train" if c[0] == "python" else c[1] for c in ours}
    ours.insert(0, ["python", "train.py", "variant=hass", "hydra.run.dir=outputs/demo"])
    for command in ours:
        verb, arguments = ("train", command[2:]) if command[0] == "python" else (command[1], command[2:])
        small = [] if "verify" in arguments else SMALL["bench decoding" if "decoding" in arguments else verb]
        run(verb, *arguments, *small, cwd=tmp_path)


def test_python_example_runs(tmp_path):
    """The Python block, against the run folder it names."""
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    run("train", "hydra.run.dir=outputs/demo", *SMALL["train"], cwd=tmp_path)
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tau" in done.stdout


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


@pytest.mark.slow
def test_make_demo_reaches_tau_3_with_identical_outputs(tmp_path):
    """What a newcomer runs, from a copy of the tracked files."""
    import json

    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split("\0")[:-1]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["make", "demo"], cwd=tmp_path, check=True)
    metrics = json.loads((tmp_path / "outputs" / "demo" / "metrics.json").read_text())
    assert metrics["tau"] >= 3.0
    assert metrics["identical"]["count"] == metrics["identical"]["of"] == 40
