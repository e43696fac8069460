"""Shipped benchmark suites: complete, of one shape, dealt evenly, and never part of the bundled training data."""

import json
from collections import Counter
from pathlib import Path

import pytest

from eaglelab.assets import bundled_data, bundled_suite
from eaglelab.data.conversations import Conversation, load_conversations
from eaglelab.evaluation import SUITES, load_suite
from eaglelab.evaluation.suites import spread

SIZES = {"mt_bench": 80, "humaneval": 80, "gsm8k": 80, "alpaca": 80, "sum": 80, "qa": 80, "spec_bench": 480}


def test_every_suite_is_there():
    assert set(SUITES) == set(SIZES)
    for name, size in SIZES.items():
        suite = load_suite(name)
        assert len(suite.prompts) == len({prompt.id for prompt in suite.prompts}) == size
        assert all(prompt.category for prompt in suite.prompts)
    assert {len(prompt.messages) for prompt in load_suite("mt_bench").prompts} == {2}
    six = Counter(prompt.category for prompt in load_suite("spec_bench").prompts)
    names = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
    assert six == dict.fromkeys(names, 80)


def test_sources_and_licences_are_written_down():
    readme = (Path(bundled_suite("qa")).parent / "README.md").read_text(encoding="utf-8")
    for name in SUITES:
        assert f"| `{name}` |" in readme


def test_no_question_is_in_the_bundled_training_data():
    rows = [one for split in ("train", "val") for one in load_conversations(bundled_data(split))]
    trained = {one.messages[0]["content"].strip() for one in rows}
    asked = {prompt.messages[0]["content"].strip() for name in SUITES for prompt in load_suite(name).prompts}
    assert not asked & trained


def prompts(categories: str) -> list[Conversation]:
    return [Conversation(str(n), ({"role": "user", "content": "?"},), category=c) for n, c in enumerate(categories)]


def test_a_limit_is_dealt_evenly_over_the_categories():
    assert [one.id for one in spread(prompts("aaaabbc"), 3)] == ["0", "4", "6"]
    assert [one.id for one in spread(prompts("aaaabbc"), 5)] == ["0", "1", "4", "5", "6"]
    assert [one.id for one in spread(prompts("aaaa"), 2)] == ["0", "1"]
    assert len(spread(prompts("aab"), 9)) == len(spread(prompts("aab"), None)) == 3
    counts = Counter(prompt.category for prompt in load_suite("spec_bench", 12).prompts)
    assert set(counts.values()) == {2}


def test_the_digest_is_that_of_the_questions(tmp_path):
    rows = [{"question_id": n, "category": "x", "turns": [f"question {n}"]} for n in range(3)]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    suite = load_suite(str(path))
    assert suite.name == "mine"
    copy = tmp_path / "copy.jsonl"
    copy.write_text("\n".join(json.dumps(row | {"reference": ["an answer"]}) for row in rows))
    assert load_suite(str(copy)).digest == suite.digest
    rows[2]["turns"] = ["another question"]
    copy.write_text("\n".join(map(json.dumps, rows)))
    assert load_suite(str(copy)).digest != suite.digest
    assert load_suite(str(path), 2).digest == load_suite(str(copy), 2).digest


@pytest.mark.parametrize(
    ("source", "limit", "message"),
    [("mtbench", None, "shipped are mt_bench"), ("no/such.jsonl", None, "no such file"), ("qa", 0, "limit=0")],
)
def test_what_is_no_suite_is_named(source, limit, message):
    with pytest.raises(ValueError, match=message):
        load_suite(source, limit)
