"""Readers: every accepted shape, and one clear error with file and line for everything else."""

import gzip
import json

import datasets
import pytest

from eaglelab.data import load_conversations, load_prompts

USER = {"role": "user", "content": "q 🎉"}
ASSISTANT = {"role": "assistant", "content": "a"}
GOOD = {"messages": [USER, ASSISTANT]}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        (GOOD, "ua"),
        ({"messages": [{"role": "system", "content": "s"}, USER, ASSISTANT]}, "sua"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "ua"),
        ({"conversations": [{"from": r, "value": "x"} for r in ("system", "user", "assistant")]}, "sua"),
        ({"question": "q", "answer": ""}, "ua"),
        ({"messages": [USER, {**ASSISTANT, "extra": 1}], "conversations": None, "other": []}, "ua"),
    ],
    ids=["messages", "system", "sharegpt", "sharegpt_plain_roles", "question_answer", "extra_keys"],
)
def test_shapes(tmp_path, row, roles):
    (chat,) = load_conversations(write(tmp_path / "a.jsonl", row))
    assert "".join(m["role"][0] for m in chat.messages) == roles
    assert all(set(m) == {"role", "content"} for m in chat.messages)
    assert chat.id == "a.jsonl:1"


def test_every_file_type_gives_the_same(tmp_path):
    rows = [{**GOOD, "id": f"r{i}"} for i in range(3)]
    write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    expected = load_conversations(tmp_path / "a.jsonl")
    assert [chat.id for chat in expected] == ["r0", "r1", "r2"]
    for name in ("a.json", "a.jsonl.gz", "a.parquet"):
        assert load_conversations(tmp_path / name) == expected, name
    assert load_conversations(tmp_path) == expected * 4  # a folder: all of its files
    assert load_conversations([tmp_path / "a.json", str(tmp_path / "a.jsonl")], limit=4) == expected + expected[:1]


def test_parquet_with_mixed_shapes(tmp_path):
    """Columns that other rows use come out as None and do not count."""
    rows = [
        {"question": "q", "answer": "a", "turns": None},
        {"question": None, "answer": None, "turns": ["t"]},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert [len(chat.messages) for chat in load_prompts(tmp_path / "a.parquet")] == [1, 1]


def test_empty_lines_and_byte_order_mark(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n\n  \r\n" + json.dumps(GOOD).encode())
    assert [chat.id for chat in load_conversations(file)] == ["a.jsonl:1", "a.jsonl:4"]


def test_prompts(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["r1", "r2"]},
        {"question": "q", "answer": "the answer"},
        {"messages": [{"role": "system", "content": "s"}, USER, ASSISTANT, USER]},
        {"turns": ["q"], "reference": [["r1", "r2"], "r3"]},
    )
    first, second, third, fourth = load_prompts(file)
    assert (first.id, first.category, first.reference) == ("81", "writing", ("r1", "r2"))
    assert [m["content"] for m in first.messages] == ["one", "two"]
    assert not any(chat.answered for chat in (first, second, third))
    assert second.reference == ("the answer",)
    assert [m["role"] for m in third.messages] == ["system", "user", "user"]
    assert fourth.reference == ("r1", "r2", "r3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"is not a JSON object .* at column 15\); write one complete object per line"),
        ("[1, 2]", r"is a list, not an object"),
        ('"text"', r"is a str, not an object"),
        ({"text": "x", "n": 1}, r"has `text`, `n`; one row needs `messages`"),
        ({}, r"has nothing; one row needs"),
        ({"messages": []}, r"`messages` is list \[\]; it must be a list with at least one"),
        ({"messages": "hi"}, r"`messages` is str 'hi'"),
        ({"messages": ["hi"]}, r"`messages\[0\]` lacks `role` or `content`"),
        ({"messages": [USER, {"role": "assistant"}]}, r"`messages\[1\]` lacks `role` or `content`"),
        (
            {"messages": [USER, {"role": "bot", "content": ""}]},
            r"unknown role 'bot'; use one of system, user",
        ),
        ({"messages": [USER, {"role": ["a"], "content": ""}]}, r"unknown role \['a'\]"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            r"`messages\[1\].content` is NoneType",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"`messages\[0\].content` is list"),
        ({"conversations": [{"from": "tool", "value": ""}]}, r"unknown from 'tool'; use one of .*human, gpt"),
        ({"question": 3, "answer": "4"}, r"`question` is int 3; it must be text"),
        ({"question": "q", "answer": 4}, r"`answer` is int 4"),
        ({"question": "q"}, r"no assistant answer.*let the target answer the prompts first"),
        ({"turns": ["q"]}, r"no assistant answer.*let the target answer the prompts first"),
        ({"turns": [1]}, r"`turns\[0\]` is int 1"),
        ({"turns": ["q"], "reference": {"a": 1}}, r"`reference` is dict"),
        ({"messages": [USER]}, r"no assistant answer"),
    ],
)
def test_broken_line_names_file_line_cause_and_way_out(tmp_path, line, message):
    file = write(tmp_path / "data.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(ValueError, match=r"data\.jsonl:3: .*" + message) as raised:
        load_conversations(file)
    assert "; " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_not_utf8(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: is not UTF-8 .*byte 15.*save the file as UTF-8"):
        load_conversations(file)


def test_truncated_gzip(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    packed = gzip.compress("\n".join(json.dumps({**GOOD, "id": str(i)}) for i in range(9)).encode())
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:\d+: cannot be read .*is the file complete"):
        load_conversations(file)


def test_limit_stops_before_a_broken_line(tmp_path):
    file = write(tmp_path / "a.jsonl", GOOD, GOOD, "broken")
    assert len(load_conversations(file, limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "holds no conversation"),
        ("a.jsonl", "\n\n", "holds no conversation"),
        ("a.json", "[]", "holds no conversation"),
        ("a.json", '{"messages": []}', "holds a dict; a .json file holds one list"),
        ("a.json", '[\n{"question": "q",\n}]', r"a\.json:3: is not JSON .*name it \.jsonl"),
        ("a.json", '[{"question": "q", "answer": "a"}, {"x": 1}]', r"a\.json: row 2: has `x`"),
        ("a.parquet", "not parquet", "cannot be read as Parquet"),
        ("a.csv", "q,a", r"unknown file type; rename or convert it to one of \.jsonl"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        load_conversations(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


def test_sources_that_do_not_exist(tmp_path):
    for source in (tmp_path / "nope.jsonl", "/nope", "data/nope.jsonl", "nope"):
        with pytest.raises(ValueError, match=r"nope.*: no such file; check the path"):
            load_conversations(source)
    with pytest.raises(ValueError, match="is a folder without data files"):
        load_conversations(tmp_path)
    with pytest.raises(ValueError, match="no data file was given"):
        load_conversations([])
    with pytest.raises(ValueError, match="limit=0"):
        load_conversations(tmp_path, limit=0)


def test_hub_names(monkeypatch, tmp_path):
    """owner/name goes to the hub when no such path exists; its errors keep both readings apart."""
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if name == "no/where":
            raise ConnectionError("offline")
        return datasets.Dataset.from_list([{"question": "q", "answer": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_conversations("owner/name")[0].id == "name: row 1"
    assert len(load_conversations(["owner/name:test"])) == 1
    assert asked == [("owner/name", "train"), ("owner/name", "test")]
    with pytest.raises(ValueError, match=r"no/where: is neither a file here nor .*offline"):
        load_conversations("no/where")
