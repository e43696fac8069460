"""The notebooks: their code runs, their pages are fit to be read, and (slow) a kernel runs them as they stand."""

import contextlib
import io
import json
import re
import runpy
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

from tests.cli.conftest import as_if_alone, run

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LESS = {"exactness": {"draws = 2000": "draws = 30", "limit=4": "limit=2", "max_new_tokens=32": "max_new_tokens=12"}}
"""What the fast suite asks less of, as changes of a notebook's text."""


def cells(path: Path, kind: str) -> list[dict]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the notebooks find the recorded results, and a drafter of a few steps in place of the one they train."""
    root = tmp_path_factory.mktemp("notebooks")
    (root / "notebooks").mkdir()
    (root / "experiments").symlink_to(ROOT / "experiments")
    small = ["data.limit=48", "data.val_limit=8", "data.batch_size=1", "trainer.val_check_interval=12"]
    job = ["variant=eagle", "recipe=none", *small, "trainer.max_steps=12", "logger=none"]
    run("train", *job, "hydra.run.dir=outputs/notebooks/eagle", cwd=root)
    return root / "notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_code_runs(path, folder):
    """Cell by cell in this process, the small training apart."""
    text = [source(cell) for cell in cells(path, "code")]
    for old, new in LESS.get(path.stem, {}).items():
        assert any(old in one for one in text), old
        text = [one.replace(old, new) for one in text]
    drawn, printed = 0, io.StringIO()
    backend, style = matplotlib.get_backend(), matplotlib.rcParams.copy()
    plt.switch_backend("agg")
    try:
        with as_if_alone(), contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            namespace = {"__name__": "__main__"}
            for one in text:
                exec(compile(one, path.name, "exec"), namespace)
                drawn += len(plt.get_fignums())
                plt.close("all")
    finally:
        matplotlib.rcParams.update(style)
        plt.switch_backend(backend)
    assert drawn == sum("plt.subplots" in one for one in text) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_is_complete_and_clean(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not re.search(r"/(tmp|home|root|work|Users)/", text), "a machine's path"
    for cell in cells(path, "code"):
        assert not any(output["output_type"] == "error" for output in cell["outputs"])
        if "plt.show()" in source(cell):
            assert any("image/png" in output.get("data", {}) for output in cell["outputs"]), source(cell)
    words = " ".join(source(cell) for cell in cells(path, "markdown"))
    assert "What this shows, and what it does not" in words
    for link in re.findall(r"\]\(([^)]+)\)", words):
        assert (path.parent / link).exists(), link
    for name in re.findall(r"`((?:experiments|tests|docs)/[\w./]+)`", words):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"sweep=(\w+)", words):
        assert (ROOT / "configs" / "sweep" / f"{name}.yaml").is_file(), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_kernel_runs_them_from_nothing(tmp_path):
    """What writes the pages, the training included."""
    execute = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))["execute"]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    for path in NOTEBOOKS:
        notebook = execute(path, tmp_path / "notebooks")
        for cell in notebook.cells:
            if "plt.show()" in cell["source"]:
                assert any("image/png" in output.get("data", {}) for output in cell["outputs"])
    assert (tmp_path / "outputs" / "notebooks" / "eagle" / "metrics.json").is_file()
