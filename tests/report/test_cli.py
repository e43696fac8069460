"""`eaglelab report` as a user runs it."""

import shutil

import pytest

from tests.cli.conftest import run


def test_a_comparison(measured, tmp_path):
    shutil.copytree(measured, tmp_path / "compared")
    for path in (tmp_path / "compared" / "cells").glob("*-b2"):
        shutil.rmtree(path)
    done = run("report", "compare=compared", "ids=[3]", "where.suite='chat & <b>more'", cwd=tmp_path)
    assert done.stdout.startswith("written: compared/report.html, and beside it figures/")
    text = (tmp_path / "compared" / "report.html").read_text()
    assert '"id":"3"' in text
    assert '"id":"0"' not in text
    assert "plain, chat \\u0026 \\u003cb\\u003emore, dynamic" in text
    assert [path.name for path in tmp_path.iterdir()] == ["compared"]


def test_trees(measured, tmp_path):
    records = measured / "cells" / "sharp-seed0-5-b1" / "rounds.parquet"
    done = run("report", f"trees={records}", "out=page.html", cwd=tmp_path)
    assert done.stdout == "written: page.html\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "error: give one of compare=DIR"),
        (["compare=a", "trees=b"], "error: give one of compare=DIR"),
        (["compare=nothing"], "error: compare=nothing does not exist; give the folder that `eaglelab compare` wrote"),
        (
            ["trees=nothing.parquet"],
            "error: trees=nothing.parquet: no rounds.parquet or rounds.jsonl here; name a file",
        ),
        (["trees=.", "ids=[1]"], "error: trees=.: no rounds.parquet"),
        (["trees=a.csv"], "error: a.csv: records are read from .jsonl and .parquet"),
        (["answers=many", "compare=nothing"], "error: answers=many is no number; its default is 3"),
        (["max_rounds=0", "trees=."], "error: max_rounds=0: give a whole number from 1 on"),
    ],
)
def test_wrong_input_ends_in_one_message(tmp_path, arguments, complaint):
    (tmp_path / "a.csv").write_text("")
    done = run("report", *arguments, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
