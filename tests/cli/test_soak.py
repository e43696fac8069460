"""The soak of experiments/soak, a minute of it."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "soak" / "decoding.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("soak_decoding", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_mixed_decoding(script, trained):
    figures = script.soak([trained], minutes=1)
    assert figures["problems"] == []
    assert abs(figures["growth"]) < 0.02
    assert figures["seen"]["compared"] > 0
    assert sum(figures["faults"].values()) > 0
