"""docs/failures.md says what was measured, and names the tests that the faults name."""

import json
import re
import runpy
from pathlib import Path

import pytest

from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "experiments" / "failures" / "results.json").read_text())
ENTRIES = {
    re.search(r"^`(\w+)`$", text, re.MULTILINE)[1]: " ".join(text.split())
    for text in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
}


def test_there_are_enough_of_them_and_each_is_whole():
    assert len(ENTRIES) >= 20
    for text in ENTRIES.values():
        assert all(f"* **{part}:**" in text for part in ("Seen", "Shapes", "Measured", "Test")), text[:80]


@pytest.mark.parametrize("name", ENTRIES)
def test_the_test_is_the_one_that_the_fault_names(name):
    assert f"* **Test:** `{MUTANTS[name].killed_by}`" in ENTRIES[name]


@pytest.mark.parametrize("part", ["training", "decoding"])
def test_figures_are_the_recorded_ones(part):
    cells = RESULTS[part]
    told = [name for name in ENTRIES if name in cells]
    assert len(told) >= 10
    for name in told:
        one = cells[name]
        right = cells[f"right/{one['variant']}" + (f"/{one['tree']}" if part == "decoding" else "")]
        assert f"tau {right['tau']:.2f} -> {one['tau']:.2f}" in ENTRIES[name]
        if part == "decoding":
            assert f"{one['identical']} of {one['of']} answers equal" in ENTRIES[name]
        else:
            assert f"reported {one['reported_tau']:.2f}" in ENTRIES[name]


def test_the_tables_are_those_of_the_study(capsys):
    runpy.run_path(str(ROOT / "experiments" / "failures" / "run.py"))["show"](RESULTS)
    tables = capsys.readouterr().out.strip()
    assert tables.count("\n|---") == 5
    assert tables in PAGE


def test_paths_and_links_exist():
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link
