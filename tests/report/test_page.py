"""The report's page: its numbers are those of the rounds, it refers to nothing outside, and its texts are escaped."""

import base64
import hashlib
import json
import re
import shutil

import numpy as np
import pytest

from eaglelab.evaluation import read_records
from eaglelab.report import write_report
from eaglelab.report.comparison import Comparison
from eaglelab.report.content import summary_table
from tests.report.pages import Page


@pytest.fixture(scope="module")
def text(reported):
    return (reported / "report.html").read_text()


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def cells_of(folder, **labels):
    found = [json.loads(path.read_text()) | {"path": path.parent} for path in folder.glob("cells/*/cell.json")]
    return [cell for cell in found if all(cell["cell"][key] == value for key, value in labels.items())]


def lines_of(table, width):
    """Rows with the places that are left open filled from above."""
    head, *rows = table
    filled, above = [], [""] * width
    for row in rows:
        above = [new or old for new, old in zip(row[:width], above, strict=True)]
        filled.append(dict(zip([title.split("|")[0] for title in head], [*above, *row[width:]], strict=True)))
    return filled


@pytest.mark.parametrize(("number", "suite"), [(0, None), (1, "gsm8k"), (2, "chat & <b>more")])
def test_the_tables_numbers_are_those_of_the_rounds(page, reported, number, suite):
    lines = lines_of(page.tables[number], width=3)
    assert [(line["batch"], line["drafter"]) for line in lines] == [
        ("1", "plain"), ("1", "sharp"), ("2", "plain"), ("2", "sharp"),
    ]  # fmt: skip
    for line in lines:
        labels = {"name": line["drafter"], "batch": int(line["batch"])} | ({"suite": suite} if suite else {})
        cells = cells_of(reported, **labels)
        records = [record for cell in cells for record in read_records(cell["path"] / "rounds.parquet")]
        accepted = np.array([record["accepted"] for record in records])
        assert line["tau"].split("|")[0] == f"{1 + accepted.mean():.2f}"
        assert line["first token"] == f"{100 * (accepted >= 1).mean():.1f}%"
        confidence = np.array([value for record in records for value in record["confidence"]])
        outcome = np.array([value for record in records for value in record["node_accepted"]])
        bins = np.minimum((confidence * 10).astype(int), 9)
        gaps = [abs((outcome[bins == k] - confidence[bins == k]).sum()) for k in range(10)]
        assert line["calib. error"] == f"{sum(gaps) / len(confidence):.3f}"
        turns = [turn for cell in cells for turn in cell["per_prompt"]]
        tokens, seconds, plain_tokens, plain_seconds = (
            sum(turn[side][key] for turn in turns)
            for side in ("speculative", "baseline")
            for key in ("round_tokens", "decode_s")
        )
        assert line["speed-up"].split("|")[0] == f"{tokens / seconds / (plain_tokens / plain_seconds):.2f}x"
        draft = sum(record["draft_s"] for record in records) / len(records)
        assert line["draft cost"] == f"{draft / (plain_seconds / plain_tokens):.2f}"
        assert line["identical"] == f"{len(turns)} of {len(turns)}"


def test_intervals_are_those_of_the_results(page, reported):
    summary = json.loads((reported / "results.json").read_text())["summary"]
    for line in lines_of(page.tables[1], width=3):
        (row,) = [
            row for row in summary
            if (row["name"], row["suite"], row["batch"]) == (line["drafter"], "gsm8k", int(line["batch"]))
        ]  # fmt: skip
        for name, title, unit in (("tau", "tau", ""), ("speedup", "speed-up", "x")):
            ends = f"{row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f}"
            assert line[title] == f"{row[name]:.2f}{unit}|{ends}"


def test_contrasts_are_those_of_the_results(page, reported):
    rows = json.loads((reported / "results.json").read_text())["contrasts"]
    (table,) = [table for table in page.tables if table and "verdict" in table[0]]
    shown = [line for line in lines_of(table, width=0) if line["measure"] == "speed-up"]
    for line, row in zip(shown, [row for row in rows if row["measure"] == "speedup"], strict=True):
        assert line["difference"] == f"{row['difference']:+.2f}".replace("-", "\N{MINUS SIGN}")
        assert line["verdict"] == row["verdict"]
        assert line["task"] == row["suite"]


def test_cost_table(page):
    (table,) = [table for table in page.tables if table and "simulated tau" in table[0]]
    rows = [row for row in table[1:] if row[0] == "sharp"]
    assert rows == [["sharp", "0", "20", "900", "40", "2.500", "1.23", "321", "7", "2.00", "1.25"]]


def test_the_page_refers_to_nothing_outside(page, text):
    assert [one for one in page.references if not one.startswith("#")] == []
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(page.elements)
    assert page.elements.count("script") == 2
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    (digest,) = re.findall(r"script-src '(sha256-[^']*)'", text)
    script = text[text.index("<script>") + len("<script>") : text.rindex("</script>")]
    assert digest == "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def test_ids_are_unique(text):
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


def test_names_of_others_are_escaped(text):
    assert "chat &amp; &lt;b&gt;more" in text
    assert "a &amp; &lt;b&gt;target" in text
    assert "<b>more" not in text
    assert "<b>target" not in text


def test_what_was_not_controlled_is_said(text):
    for words in (
        "One training seed of sharp.",
        "The trainings differ in supervised rows: plain 600, sharp 900.",
        "Budget of each training: 20 steps.",
        "Few prompts",
        "gsm8k: 4 prompts and 1 test leave no corrected p below 0.12",
        "100% of the answers were cut off at 12 tokens",
    ):
        assert words in text
    assert "in optimizer steps" not in text


def test_files_beside_the_page(reported):
    figures = {path.name for path in (reported / "figures").iterdir()}
    for name in (
        "tau-dynamic-T0", "depth-cumulative-dynamic-T0", "depth-conditional-dynamic-T0", "speed-b1", "speed-b2",
        "time-b1-T0", "reliability-dynamic-T0", "training-seconds", "training-rows",
    ):  # fmt: skip
        assert {f"{name}.svg", f"{name}.png"} <= figures
        assert (reported / "figures" / f"{name}.svg").read_text().startswith("<?xml")
    tables = {path.name for path in (reported / "tables").iterdir()}
    assert {
        "summary.tex",
        "summary.md",
        "summary-chat_b_more.tex",
        "contrasts.tex",
        "cost.md",
        "differences.md",
    } <= tables


def test_an_unfinished_comparison(measured, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(measured, folder)
    (folder / "results.json").unlink()
    for path in folder.glob("cells/*"):
        if not path.name.startswith("plain-seed0-5-b1"):
            shutil.rmtree(path)
    text = write_report(folder, answers=0).read_text()
    assert "is not finished" in text
    assert "trees-data" not in text
    assert "None were computed" in text


def test_cells_of_another_plan_do_not_count(measured, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(measured, folder)
    old = json.loads((folder / "cells" / "sharp-seed0-5-b1" / "cell.json").read_text())
    old["seconds"]["decode"] += 1  # of other limits, say
    old["rounds"] *= 2
    (folder / "cells" / "old").mkdir()
    (folder / "cells" / "old" / "cell.json").write_text(json.dumps(old))
    assert len(Comparison(folder).cells) == 12
    assert summary_table(Comparison(folder)) == summary_table(Comparison(measured))


def test_wrong_folders(measured, tmp_path):
    with pytest.raises(ValueError, match="nothing does not exist; give the folder that `eaglelab compare` wrote"):
        write_report(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"holds no comparison\.json"):
        write_report(tmp_path)
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(ValueError, match="no measured cell yet"):
        write_report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"a"')
    with pytest.raises(ValueError, match=r"comparison\.json is damaged"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="where.tree=chain: no cell of that kind; there are dynamic"):
        write_report(measured, where={"tree": "chain"})
    with pytest.raises(ValueError, match="no answer 99"):
        write_report(measured, ids=["99"])
