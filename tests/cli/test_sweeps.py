"""Sweep files: what W&B and Hydra read in them is one grid, and an agent's command line runs."""

import copy
import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
import time

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from eaglelab.cli.config import config_dir, register_resolvers
from tests.cli.conftest import SMALL, run
from tests.cli.sweep_files import FILES, FOLDER, ROOT, agent_command, points, read, violations

TRAININGS = [path for path in FILES if path.stem != "tree"]
TINY = [*SMALL, "trainer.max_steps=1", "trainer.val_check_interval=1", "data.limit=8", "data.val_limit=2"]
COLLECT = runpy.run_path(str(FOLDER / "collect.py"))


def verb_of(path) -> str:
    return "evaluate" if path.stem == "tree" else "train"


def composed(verb: str, overrides: list[str], hydra: bool = False) -> dict:
    register_resolvers()
    with initialize_config_dir(config_dir=config_dir(), job_name=verb, version_base="1.3"):
        config = compose(config_name=verb, overrides=overrides, return_hydra_config=hydra)
    plain = OmegaConf.to_container(config)
    return plain["hydra"] if hydra else {k: v for k, v in plain.items() if k != "logger"}


def as_set(overrides) -> set[str]:
    """Overrides in one spelling."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return {f"{one.key_or_group}={one.value()!r}" for one in parsed}


def holds(written, name: str) -> bool:
    """Whether W&B's file of a run names the metric; its service may still be writing when the run has ended."""
    for _ in range(100):
        if name.encode() in written.read_bytes():
            return True
        time.sleep(0.2)
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_obeys_the_schema_and_opens_with_its_commands(path):
    assert violations(read(path)) == []
    text = path.read_text(encoding="utf-8")
    first, second, third = text.splitlines()[:3]
    assert first == f"# wandb sweep experiments/sweeps/{path.name}"
    assert second.startswith("# wandb agent")
    verb = "eaglelab evaluate -m run=outputs/demo" if path.stem == "tree" else "python train.py -m"
    assert third == f"# Without W&B: {verb} sweep={path.stem}"


def test_the_check_of_the_schema_can_fail():
    good = read(FOLDER / "noise.yaml")
    for change in (
        {"method": "gird"},
        {"metrics": [{"name": "val/tau"}]},
        {"metric": {"name": "val/tau", "goal": "max"}},
        {"metric": {"goal": "maximize"}},
        {"parameters": {"seed": 3}},
        {"parameters": {"seed": {"values": []}}},
        {"parameters": {"seed": {"values": [1], "value": 1}}},
        {"command": "python train.py"},
    ):
        assert violations(copy.deepcopy(good) | change), change


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_wandbs_own_schema(path):
    """`pip install --no-deps sweeps==0.3.0` (its requirements do not fit ours; the schema is all that is read)."""
    try:
        files = importlib.metadata.files("sweeps") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the file schema.json of the package sweeps: pip install --no-deps sweeps==0.3.0")
    import jsonschema

    (schema,) = [file for file in files if file.name == "schema.json"]
    jsonschema.Draft7Validator(json.loads(schema.read_text())).validate(read(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hydra_and_wandb_train_the_same_grid(path):
    config = read(path)
    fixed = {name: one["value"] for name, one in config["parameters"].items() if "value" in one}
    free = [{k: v for k, v in point.items() if k not in fixed} for point in points(config)]
    ours = {frozenset(as_set(f"{k}={v}" for k, v in point.items())) for point in free}
    assert len(ours) == len(free)

    told = [f"run={fixed['run']}"] if "run" in fixed else []
    hydra = composed(verb_of(path), [f"sweep={path.stem}", *told], hydra=True)
    params = [f"{key}={value}" for key, value in hydra["sweeper"]["params"].items()]
    batches = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(params), None)
    assert {frozenset(as_set(job)) for job in batches[0]} == ours
    assert len(batches[0]) == len(ours)

    first = [f"{k}={v}" for k, v in free[0].items()]
    agent = [f"{k}={v}" for k, v in points(config)[0].items()]
    assert composed(verb_of(path), [f"sweep={path.stem}", *told, *first]) == composed(verb_of(path), agent)


@pytest.mark.parametrize("path", TRAININGS, ids=lambda path: path.stem)
def test_every_point_is_a_configuration_that_trains(path, tmp_path, monkeypatch):
    """The agent's arguments of the last point, for one step; the ends of a grid are where it breaks."""
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = read(path)
    env, interpreter, program, *arguments = agent_command(config, points(config)[-1])
    assert (env, interpreter, program) == ("/usr/bin/env", "python", "train.py")
    run("train", *arguments, *TINY, "logger=none", cwd=tmp_path)
    folder = tmp_path / "outputs" / "sweeps" / path.stem / "abc"
    told = OmegaConf.load(folder / ".hydra" / "config.yaml")
    for name, value in points(config)[-1].items():
        if name != "variant":
            asked = OmegaConf.create({"value": None if value == "null" else value})
            wanted = OmegaConf.to_object(asked)["value"] if not str(value).startswith("[") else json.loads(value)
            assert OmegaConf.select(told, name) == wanted, name
    assert config["metric"]["name"] in json.loads((folder / "metrics.json").read_text())["training"]["final"]


@pytest.mark.slow
def test_an_agents_command_line_runs_in_a_process_of_its_own(tmp_path):
    """Offline, from the checkout as an agent would, and W&B's file of the run holds the sweep's metric."""
    config = read(FOLDER / "taps.yaml")
    command = agent_command(config, points(config)[0])
    command[command.index("python")] = sys.executable
    where = f"hydra.run.dir={tmp_path}/${{oc.env:WANDB_RUN_ID}}"
    command = [where if part.startswith("hydra.run.dir=") else part for part in command]
    environment = dict(os.environ) | {"WANDB_RUN_ID": "abc", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run([*command, *TINY], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (tmp_path / "abc").glob("wandb/offline-run-*-abc/run-abc.wandb")
    assert holds(written, config["metric"]["name"])


def test_the_tree_sweep_logs_its_metric(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = read(FOLDER / "tree.yaml")
    point = points(config)[-1] | {"run": str(trained), "limit": 1}
    program, *arguments = agent_command(config, point)[2:]
    assert (ROOT / program).is_file()
    run("evaluate", *arguments, "max_new_tokens=6", cwd=tmp_path)
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert holds(written, config["metric"]["name"])
    latest = json.loads((trained / "metrics.json").read_text())
    assert latest["settings"]["tree"] | {"name": "dynamic", "width": 10, "depth": 8} == latest["settings"]["tree"]


def test_multirun_folders_are_named_and_collected(tmp_path, monkeypatch):
    """Two points of a sweep; each training is a W&B run of its own."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = ["-m", "sweep=taps", "variant.taps=[9],[2,9]", "seed=1", "hydra.sweep.dir=all", "logger=wandb"]
    run("train", *job, *TINY, cwd=tmp_path)
    folders = sorted(folder for folder in (tmp_path / "all").iterdir() if folder.is_dir())
    for folder, taps in zip(folders, ("[2,9]", "[9]"), strict=True):
        assert folder.name.endswith(f"_variant.taps-{taps[1:-1].replace(',', '-')}"), folder.name
        assert not set(folder.name) & set("=,[] "), "it must fit into run=DIR"
        assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 1
        assert OmegaConf.load(folder / ".hydra" / "config.yaml").variant.taps == json.loads(taps)
    runs = COLLECT["trainings"](tmp_path / "all")
    assert {one["variant.taps"] for one in runs} == {"[9]", "[2,9]"}
    assert list(runs[0]) == ["variant.taps", *COLLECT["MEASURED"]]  # what is the same in all is no column
    assert all(one["steps"] == 1 and one["rows"] > 0 and one["val/tau"] >= 1 for one in runs)


def test_optunas_space_is_of_settings_that_exist():
    params = OmegaConf.load(ROOT / "configs" / "sweep" / "optuna_lr.yaml").hydra.sweeper.params
    config = OmegaConf.create(composed("train", []))
    for key, space in params.items():
        assert isinstance(OmegaConf.select(config, key), int | float), key
        (parsed,) = OverridesParser.create().parse_overrides([f"{key}={space}"])
        assert parsed.is_sweep_override(), key


def test_long_and_odd_overrides_make_a_folder_name():
    register_resolvers()
    name = OmegaConf.create({"name": "${eaglelab.folder_name:${text}}", "text": "a-[2,6]_b-x/y z_" + 300 * "c"}).name
    other = OmegaConf.create({"name": "${eaglelab.folder_name:${text}}", "text": "a-[2,6]_b-x/y z_" + 301 * "c"}).name
    assert name.startswith("a-2-6_b-x-y-z_ccc") and len(name) <= 200
    assert name != other


@pytest.mark.parametrize(
    ("verb", "arguments", "message"),
    [
        ("train", ["sweep=noise"], "add -m"),
        ("evaluate", ["sweep=tree", "run=x"], "add -m"),
        ("train", ["-m", "sweep=nois"], "Could not find 'sweep/nois'"),
        ("train", ["-m", "sweep=tree"], "tree"),
        ("train", ["-m", "sweep=noise", "variant.noise=loud", "variant.noise_scale=0.1", "seed=0"], "noise law 'loud'"),
    ],
)
def test_wrong_sweeps_end_in_one_message(verb, arguments, message, tmp_path):
    done = run(verb, *arguments, *(TINY if message.startswith("noise") else []), cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_seeds_are_pooled_and_the_best_point_is_first():
    measured = {"tau": None, "steps": 2, "rows": 10, "seconds": 1.0}
    taus = {("a", "0"): 2.0, ("a", "1"): 3.0, ("b", "0"): 4.0, ("b", "1"): 1.5}
    runs = [{"noise": noise, "seed": seed, "val/tau": tau} | measured for (noise, seed), tau in taus.items()]
    best, other = COLLECT["pooled"](runs)
    assert (best["noise"], best["val/tau"], best["by seed"]) == ("b", 2.75, "4.00, 1.50")
    assert (other["noise"], other["val/tau"], other["tau"]) == ("a", 2.5, None)
    assert COLLECT["table"]([best, other]).splitlines()[0] == "| noise | val/tau | steps | rows | seconds | by seed |"


def test_collect_reads_evaluations_and_refuses_what_is_neither(trained, tmp_path):
    run("evaluate", f"run={trained}", "limit=1", "max_new_tokens=4", cwd=tmp_path)
    rows = COLLECT["evaluations"](trained)
    assert rows == sorted(rows, key=lambda row: -(row["tokens/s"] or 0))
    assert {"name", "width", "budget", "tau", "speed-up"} <= set(rows[0])
    assert COLLECT["table"](rows).count("\n") == len(rows) + 1
    with pytest.raises(ValueError, match="no finished training"):
        COLLECT["trainings"](tmp_path)
