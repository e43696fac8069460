"""`eaglelab bench` on a shape of seconds."""

import json

import pytest

from eaglelab.training.cost import Shape, measure
from tests.cli.conftest import run

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 7, "num_heads": 2, "vocab_size": 64}


def test_bench_prints_and_saves_every_variant(tmp_path):
    shape = [f"shape.{name}={value}" for name, value in TINY.items()]
    done = run("bench", *shape, "shape.batch=1", "shape.length=64", "steps=2", "out=cost.json", cwd=tmp_path)
    costs = json.loads((tmp_path / "cost.json").read_text())
    assert [cost["variant"] for cost in costs] == ["eagle", "hass", "eagle3"]
    for cost in costs:
        assert cost["variant"] in done.stdout
        assert sum(cost["split"].values()) == pytest.approx(1)
        assert cost["seconds_low"] <= cost["seconds"] <= cost["seconds_high"]
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_bad_input_ends_in_one_message(tmp_path):
    for arguments, message in ((["variants=[egale]"], "variants='egale' is not one of"), (["steps=0"], "steps=0")):
        done = run("bench", *arguments, cwd=tmp_path, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_memory_grows_linearly_with_length_and_steps_and_hass_is_one_pass():
    """At a vocabulary where a batch's logits would dominate. Peaks are resident memory, so bounds leave 10 to 15 %."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_layers": 7,
        "num_heads": 4,
        "vocab_size": 32768,
        "batch": 1,
    }
    at = {S: measure("eagle3", Shape(**shape, length=S), steps=2).peak_mib for S in (1024, 2048, 4096)}
    assert (at[4096] - at[2048]) / (at[2048] - at[1024]) == pytest.approx(2, rel=0.15)
    by_steps = [measure("eagle3", Shape(**shape, length=2048), {"steps": s}, steps=2).peak_mib for s in (3, 5, 7)]
    assert by_steps[2] - by_steps[1] == pytest.approx(by_steps[1] - by_steps[0], rel=0.15)
    eagle, hass = (measure(v, Shape(**shape, length=2048), steps=2).peak_mib for v in ("eagle", "hass"))
    assert hass <= 1.15 * eagle
