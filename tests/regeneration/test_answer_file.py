"""The file of answers: nothing lost, nothing twice, in order, of one origin, and never somebody else's file."""

import json
import os
import random
import resource
from dataclasses import replace

import pytest

from eaglelab.data import load_conversations
from eaglelab.decoding import Sampling
from eaglelab.evaluation import Chat
from eaglelab.regeneration import Answer, Answered, AnswerFile, Origin, regenerate
from tests.regeneration.conftest import prompts

ORIGIN = Origin(Sampling(temperature=0.5, seed=10), 8, {"source": "here", "fingerprint": "abc", "dtype": "float32"})
PROMPTS = prompts("ends 0", "cut 1", ("ends 2a", "ends 2b"), "fails 3", "ends 4", ("cut 5a", "never 5b"), "ends ä6")


class Script:
    """Ends, cuts or fails as the question says, in an order of its own; Ctrl-C comes before conversation `stop`."""

    def __init__(self, origin=ORIGIN, *, order=0, stop=None, well=()):
        self.origin, self.order, self.stop, self.well = origin, order, stop, well
        self.asked = []

    def answer(self, prompts, done, watcher):
        waiting = [Answered(Chat(prompt, n)) for n, prompt in enumerate(prompts) if prompt.id not in done]
        random.Random(self.order).shuffle(waiting)
        for count, one in enumerate(waiting):
            if count == self.stop:
                raise KeyboardInterrupt
            self.asked.append(one.id)
            while one.ask():
                question = one.chat.messages[-1]["content"]
                if question.startswith("fails") and one.id not in self.well:
                    one.fail("scripted")
                    break
                one.take(Answer(f"to {question}", 2, "length" if question.startswith("cut") else "eos"))
                watcher.answered(2, ())
            watcher.ended(one)


def job(path, source=None, asked=PROMPTS, **settings):
    return regenerate(source or Script(), asked, path, progress=False, **settings)


def contents(path):
    return {file.name: file.read_bytes() for file in path.parent.glob("answers*")}


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "answers.jsonl"


def test_rows(out):
    result = job(out)
    assert [row["id"] for row in rows(out)] == ["p0", "p2", "p4", "p6"]
    assert [row["id"] for row in rows(out.with_name("answers.jsonl.left_out"))] == ["p1", "p3", "p5"]
    assert rows(out)[1] == {
        "id": "p2",
        "messages": [
            {"role": "user", "content": "ends 2a"},
            {"role": "assistant", "content": "to ends 2a"},
            {"role": "user", "content": "ends 2b"},
            {"role": "assistant", "content": "to ends 2b"},
        ],
        "stop_reason": "eos",
        "tokens": 4,
        "sampling": {
            "temperature": 0.5,
            "top_k": None,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": 12,
            "max_new_tokens": 8,
        },
        "target": {"source": "here", "fingerprint": "abc", "dtype": "float32"},
        "version": "0.1.0",
    }
    cut, failed, cut_early = rows(out.with_name("answers.jsonl.left_out"))
    assert (cut["stop_reason"], failed["stop_reason"], failed["reason"]) == ("length", "failed", "scripted")
    assert [m["content"] for m in cut_early["messages"]] == ["cut 5a", "to cut 5a"], "nothing after a cut answer"
    assert "ends ä6" in out.read_text(encoding="utf-8")
    assert (result.answers, result.tokens, result.failures) == (7, 14, [("p3", "scripted")])
    assert (result.kept, result.left_out) == ({"eos": 4}, {"length": 2, "failed": 1})
    assert len(load_conversations(out)) == 4
    assert len(load_conversations(out.parent)) == 4, "what is left out is no training data, even for a whole folder"


def test_greedy_rows_have_no_seed(out):
    job(out, Script(replace(ORIGIN, sampling=Sampling(seed=3))))
    assert {row["sampling"]["seed"] for row in rows(out)} == {None}


@pytest.mark.parametrize("stop", range(7))
def test_a_job_killed_at_any_byte_ends_like_an_uninterrupted_one(out, tmp_path, stop):
    (tmp_path / "whole").mkdir()
    whole = tmp_path / "whole" / "answers.jsonl"
    job(whole)
    (tmp_path / "cut").mkdir()
    cut = tmp_path / "cut" / "answers.jsonl"
    assert job(cut, Script(order=stop, stop=stop)).interrupted
    left_by_kill = contents(cut)
    for name, content in left_by_kill.items():
        last = content.rstrip(b"\n").rfind(b"\n") + 1
        for end in {*range(last, len(content), 97), last + 1, len(content) - 1} if content else ():
            for file, whole_content in left_by_kill.items():
                (cut.parent / file).write_bytes(whole_content[:end] if file == name else whole_content)
            again = Script(order=99)
            job(cut, again)
            assert contents(cut) == contents(whole), (name, end)
            kept_by_kill = sum(text.count(b"\n") for text in left_by_kill.values()) - 1
            assert len(again.asked) <= len(PROMPTS) - kept_by_kill + 1, "only the lost row, and what failed, again"


def test_a_half_written_row_is_gone_before_anything_is_appended(out, tmp_path):
    asked = prompts(*["ends"] * 12)
    job(tmp_path / "whole" / "answers.jsonl", asked=asked)
    job(out, Script(stop=3), asked)
    for turn in range(2):
        out.write_bytes(out.read_bytes()[:-9])
        assert job(out, Script(order=turn, stop=3), asked).interrupted
    job(out, asked=asked)
    assert contents(out) == contents(tmp_path / "whole" / "answers.jsonl")


def test_what_failed_and_was_answered_later_is_answered(out):
    """Also where the later job was interrupted, so that both rows are still there."""
    job(out)
    assert job(out, Script(well=("p3",), stop=1), asked=[*PROMPTS, *prompts("", *["ends"] * 9)[8:]]).interrupted
    assert "p3" in out.read_text() and "p3" in out.with_name("answers.jsonl.left_out").read_text()
    again = Script()
    job(out, again)
    assert again.asked == []
    assert [row["id"] for row in rows(out)][:4] == ["p0", "p2", "p3", "p4"]


def test_many_interruptions(out, tmp_path):
    job(out)
    expected = contents(out)
    other = tmp_path / "other" / "answers.jsonl"
    asked = []
    for turn in range(20):
        source = Script(order=turn, stop=1)
        result = job(other, source)
        asked += source.asked
        if not result.interrupted:
            break
        assert result.answers <= 2
    assert contents(other) == expected
    assert {name: asked.count(name) for name in set(asked) - {"p3"}} == {f"p{n}": 1 for n in range(7) if n != 3}


def test_a_finished_job_asks_nothing_but_what_failed(out):
    job(out)
    before = contents(out)
    again = Script()
    result = job(out, again)
    assert again.asked == ["p3"]
    assert (result.answers, contents(out)) == (0, before)
    result = job(out, Script(well=("p3",)))
    assert [row["id"] for row in rows(out)] == ["p0", "p2", "p3", "p4", "p6"]
    assert result.left_out == {"length": 2}


def test_keep_moves_rows_and_asks_nothing(out):
    ended = job(out).kept
    before = contents(out)
    source = Script()
    everything = job(out, source, keep="all")
    assert source.asked == ["p3"]
    assert (ended, everything.kept, everything.left_out) == ({"eos": 4}, {"eos": 4, "length": 2}, {"failed": 1})
    assert [row["id"] for row in rows(out)] == ["p0", "p1", "p2", "p4", "p5", "p6"]
    job(out, keep="ended")
    assert contents(out) == before


def test_moving_rows_survives_a_kill(out, monkeypatch):
    job(out)
    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "finish", lambda self: None)
        job(out, keep="all")
    assert len(rows(out)) == 6
    job(out, keep="ended")
    assert [row["id"] for row in rows(out)] == ["p0", "p2", "p4", "p6"]
    assert [row["id"] for row in rows(out.with_name("answers.jsonl.left_out"))] == ["p1", "p3", "p5"]


def test_more_and_fewer_prompts(out, tmp_path):
    job(tmp_path / "all" / "answers.jsonl")
    job(out, asked=PROMPTS[:3])
    job(out)
    assert contents(out) == contents(tmp_path / "all" / "answers.jsonl")
    job(out, asked=PROMPTS[2:3], source=Script(replace(ORIGIN, sampling=Sampling(0.5, seed=12))))
    assert [row["id"] for row in rows(out)] == ["p2", "p0", "p4", "p6"], "rows of other prompts stay"


def test_nothing_left_out_leaves_no_second_file(out):
    job(out, asked=PROMPTS[:1])
    assert list(contents(out)) == ["answers.jsonl"]


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"sampling": Sampling(temperature=0.6, seed=10)}, "sampling.temperature was recorded as 0.5 but is 0.6"),
        ({"sampling": Sampling(temperature=0.5, seed=11)}, "sampling.seed was recorded as 10 but is 11"),
        ({"sampling": Sampling(temperature=0.5, seed=10, top_k=5)}, "sampling.top_k was recorded as None but is 5"),
        ({"sampling": Sampling(temperature=0.5, seed=10, top_p=0.9)}, "sampling.top_p"),
        ({"sampling": Sampling(temperature=0.5, seed=10, min_p=0.1)}, "sampling.min_p"),
        ({"sampling": Sampling(temperature=0.5, seed=10, repetition_penalty=1.1)}, "sampling.repetition_penalty"),
        ({"max_new_tokens": 9}, "sampling.max_new_tokens was recorded as 8 but is 9"),
        ({"target": {**ORIGIN.target, "fingerprint": "abd"}}, "target.fingerprint was recorded as 'abc' but is 'abd'"),
        ({"target": {**ORIGIN.target, "dtype": "bfloat16"}}, "target.dtype"),
        ({"target": {"server": "http://x/v1", "model": "m"}}, "target.fingerprint was recorded as 'abc' but is None"),
    ],
)
def test_another_origin_is_refused_by_name(out, changed, field):
    job(out)
    before = contents(out)
    with pytest.raises(ValueError, match=f"answers.jsonl:1: field {field}(?s:.*)another out="):
        job(out, Script(replace(ORIGIN, **changed)))
    assert contents(out) == before


def test_the_same_target_elsewhere_continues(out):
    job(out, Script(stop=2))
    job(out, Script(replace(ORIGIN, target={**ORIGIN.target, "source": "/mnt/there"})))
    assert len(rows(out)) == 4


def test_another_text_under_a_known_id_is_refused(out):
    job(out)
    changed = [*PROMPTS[:2], prompts("", "", ("ends 2a", "other"))[2], *PROMPTS[3:]]
    with pytest.raises(ValueError, match="'p2' was another text when it was answered"):
        job(out, asked=changed)


def test_prompts_at_other_places_are_refused_when_sampled(out):
    job(out)
    with pytest.raises(ValueError, match="field sampling.seed was recorded as 10 but is 11(?s:.*)place in the data"):
        job(out, asked=[PROMPTS[1], PROMPTS[0], *PROMPTS[2:]])


def test_duplicate_ids_are_refused(out):
    with pytest.raises(ValueError, match="more than one prompt has the id 'p1'"):
        job(out, asked=[*PROMPTS, PROMPTS[1]])
    assert not out.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"some notes",
        b"some notes\n",
        b'{"id": "p0", "turns": ["ends 0"]}\n',
        b'{"id": 3, "messages": [], "stop_reason": "eos", "sampling": {}, "target": {}}\n',
        b"[1, 2]\n",
        b"\x00\xff\n",
    ],
)
def test_other_files_are_not_touched(out, content):
    out.write_bytes(content)
    with pytest.raises(ValueError, match=r"answers.jsonl:1 is no row that `eaglelab generate` wrote"):
        job(out)
    assert out.read_bytes() == content


def test_a_damaged_row_is_named(out):
    job(out)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1][:50] + b"\n" + b"".join(lines[2:]))
    with pytest.raises(ValueError, match="answers.jsonl:2 is damaged(?s:.*)remove the line"):
        job(out)


def test_two_jobs_cannot_write_one_file(out):
    with AnswerFile(out, PROMPTS, ORIGIN), pytest.raises(ValueError, match="another job writes to out="):
        job(out)
    assert job(out).kept == {"eos": 4}


def test_a_full_disk_ends_the_job_and_the_next_one_goes_on(out, tmp_path):
    job(tmp_path / "all" / "answers.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))
    try:
        with pytest.raises(ValueError, match="answers of this job are saved in(?s:.*)the same command continues"):
            job(out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    job(out)
    assert contents(out) == contents(tmp_path / "all" / "answers.jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="Permission denied"):
        job(tmp_path / "answers.jsonl")


def test_names_and_choices(out):
    with pytest.raises(ValueError, match="name it .jsonl"):
        job(out.with_suffix(".json"))
    with pytest.raises(ValueError, match="keep='some' is unknown; choose one of: ended, all"):
        job(out, keep="some")


def test_nothing_answered_is_an_error_with_the_first_reason(out):
    with pytest.raises(ValueError, match=r"no prompt could be answered; the first one \(p0\): scripted"):
        job(out, asked=prompts("fails", "fails too"))


@pytest.mark.parametrize("kill", ["left_out", "answers.jsonl"])
def test_a_kill_while_the_files_are_put_in_order(out, tmp_path, monkeypatch, kill):
    job(tmp_path / "all" / "answers.jsonl")
    replace_file = os.replace

    def killed(aside, path):
        if str(path).endswith(kill):
            raise KeyboardInterrupt
        replace_file(aside, path)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            job(out, Script(order=5))
    job(out)
    assert contents(out) == contents(tmp_path / "all" / "answers.jsonl")
