"""Records as data for the viewer: everything that a picture of the round needs, and nothing that a page would run."""

import json

import pytest

from eaglelab.evaluation import open_sink, read_records
from eaglelab.report import load_answers, write_trees
from eaglelab.report.trees import as_json, gather
from tests.report.conftest import ATTACK


@pytest.fixture(scope="module")
def records(measured):
    return list(read_records(measured / "cells" / "plain-seed0-5-b1" / "rounds.parquet"))


def test_rounds_say_what_the_records_say(records):
    found = gather(records, title="a title")
    texts = found.texts
    assert [answer["id"] for answer in found.answers] == ["0", "1", "2", "3"]
    assert found.answers[1]["prompt"] == f"all well {ATTACK}"
    rounds = [one for answer in found.answers for one in answer["rounds"]]
    for record, one in zip(records, rounds, strict=True):
        assert texts[one["root"]] == record["root_text"]
        assert [texts[token] for token in one["tokens"]] == record["node_text"] + record["dropped_text"]
        assert one["parents"] == record["node_parent"] + record["dropped_parent"]
        assert one["confidence"] == pytest.approx(record["confidence"] + record["dropped_confidence"], rel=6e-3)
        assert one["kept"] == record["drafted"]
        assert one["accepted"] == [row for row, yes in enumerate(record["node_accepted"], start=1) if yes]
        assert (one["bonus"] is None) == (record["published"] == record["accepted"])
        assert one["count"] == record["accepted"]
    for answer in found.answers:  # a round's bonus token is the root of the next tree
        for one, after in zip(answer["rounds"], answer["rounds"][1:], strict=False):
            assert one["bonus"] == after["root"]


def test_as_many_answers_as_fit(records):
    first = sum(record["request"] == 0 for record in records)
    found = gather(records, title="a title", max_rounds=first + 1)
    assert [answer["id"] for answer in found.answers] == ["0"]
    assert found.left_out == 3
    assert len(gather(records, title="a title", max_rounds=1).answers) == 1, "one answer is always shown"
    assert [answer["id"] for answer in gather(records, title="", ids=["3", "1"]).answers] == ["1", "3"]


def test_records_without_texts_show_ids(records):
    fields = ("root_text", "node_text", "dropped_text", "published_text")
    found = gather([record | dict.fromkeys(fields) for record in records], title="")
    one = found.answers[0]["rounds"][0]
    assert [found.texts[token] for token in one["tokens"][: one["kept"]]] == [
        f"[{token}]" for token in records[0]["node_token"]
    ]


def test_plain_rounds_and_values_that_are_none():
    plain = {
        "request": 0, "accepted": 0, "published": 1, "published_tokens": [5], "root_token": 4, "node_token": [],
        "node_parent": [], "confidence": [], "node_accepted": [], "node_forwarded": [],
    }  # fmt: skip
    odd = plain | {"node_token": [6, 7], "node_parent": [0, 1], "confidence": [float("nan"), float("-inf")]}
    odd |= {"node_accepted": [False, False], "node_forwarded": [True, False]}
    one, other = gather([plain, odd], title="").answers[0]["rounds"]
    assert one["tokens"] == []
    assert one["ms"] == [None] * 4
    assert other["confidence"] == [None, None]
    as_json([one, other])


@pytest.mark.parametrize("text", [ATTACK, "</script><img src=x onerror=alert(1)>", "<!-- <script>", "\u2028 & \\u003c"])
def test_json_in_a_page_is_inert(text):
    written = as_json({text: [text]})
    assert not set(written) & set("<>&\u2028\u2029")
    assert json.loads(written) == {text: [text]}


def test_a_folder_of_records(measured, tmp_path):
    page = write_trees(measured, tmp_path / "new" / "page.html", ids=["2"])
    text = page.read_text()
    assert text.count('"id":"2"') == 12
    assert '"id":"0"' not in text


@pytest.mark.parametrize(
    ("source", "settings", "complaint"),
    [
        ("cells", {"out": "page.pdf"}, r"page\.pdf: the page is written as \.html"),
        ("nothing", {}, r"trees=.*nothing: no rounds\.parquet or rounds\.jsonl here"),
        ("runs", {}, "no rounds.parquet"),
        ("comparison.json", {}, r"records are read from \.jsonl and \.parquet"),
        ("cells", {"ids": ["2", "99"]}, "no answer 99; its answers are 0, 1, 2, 3"),
    ],
)
def test_wrong_input(measured, tmp_path, source, settings, complaint):
    out = tmp_path / settings.pop("out", "page.html")
    with pytest.raises(ValueError, match=complaint):
        write_trees(measured / source, out, **settings)
    assert not out.exists()


def test_old_and_empty_records(tmp_path):
    for name, rows, complaint in (
        ("old.jsonl", [{"request": 0, "round": 3, "accepted": 1, "published": 2}], "request 0, round 3 has no tree"),
        ("empty.jsonl", [], "no record"),
    ):
        with open_sink(tmp_path / name) as sink:
            for row in rows:
                sink.write(row)
        with pytest.raises(ValueError, match=complaint):
            load_answers(tmp_path / name)
