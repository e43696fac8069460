"""`eaglelab generate`: one prompt to the terminal, many into a file of training data."""

import json
import signal
import subprocess
import threading
import time

import pytest

from tests.cli.conftest import command, run
from tests.regeneration.conftest import MODEL, stub  # noqa: F401

BUNDLED = "target.source=bundled"


def asked(folder, *rows):
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "data=asked.jsonl"


def answers(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def test_a_drafter_answers_a_file(trained, tmp_path):
    """Into training data; a second job finds nothing to do, and a job without the drafter gives the same file."""
    data = asked(
        tmp_path,
        {"id": "two", "turns": ["Tom has 3 apples.", "He buys 4 more. How many?"]},
        {"id": "one", "question": "How many eggs are in 7 dozen?"},
    )
    settings = (data, "max_new_tokens=8", "keep=all")
    done = run("generate", f"run={trained}", *settings, "out=answers.jsonl", cwd=tmp_path)
    assert [answer["id"] for answer in answers(tmp_path)] == ["two", "one"]
    assert [m["role"] for m in answers(tmp_path)[0]["messages"]] == ["user", "assistant"], "nothing after a cut answer"
    assert ", tau " in done.stdout
    assert "python train.py data=jsonl data.path=answers.jsonl" in done.stdout
    assert "answer/s" in done.stderr or "s/answer" in done.stderr
    before = (tmp_path / "answers.jsonl").read_bytes()
    again = run("generate", f"run={trained}", *settings, "out=answers.jsonl", cwd=tmp_path)
    assert "answered   0 questions" in again.stdout
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    run("generate", BUNDLED, *settings, "batch=1", "out=plain.jsonl", cwd=tmp_path)
    assert (tmp_path / "plain.jsonl").read_bytes() == before, "a drafter changes the speed only"


def test_streams_the_plain_answer(trained, tmp_path):
    prompt = "prompt='Tom has 3 apples and buys 4 more. How many apples does he have?'"
    settings = (prompt, "max_new_tokens=24", "color=never")
    drafted = run("generate", f"run={trained}", *settings, cwd=tmp_path)
    plain = run("generate", f"run={trained}", *settings, "tree=none", cwd=tmp_path)
    assert drafted.stdout.replace("[", "").replace("]", "") == plain.stdout
    assert "drafted and accepted" in drafted.stderr
    assert run("generate", BUNDLED, *settings, cwd=tmp_path).stdout == plain.stdout


def test_a_server_answers(stub, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("STUB_KEY", "secret")
    stub.need_key = "secret"
    stub.behave = lambda question, before: stub.echo(question, before) if question != "b" else (400, {}, b"no b")
    server = (f"server={stub.url}", "client.key_variable=STUB_KEY", "client.body={chat_template_kwargs: {a: 1}}")
    data = asked(tmp_path, {"question": "a"}, {"question": "b"}, {"question": "c"})
    done = run("generate", *server, data, "temperature=0.5", "out=sub/answers.jsonl", cwd=tmp_path)
    rows = answers(tmp_path / "sub")
    assert [row["id"] for row in rows] == ["asked.jsonl:1", "asked.jsonl:3"]
    assert rows[1]["target"]["model"] == MODEL
    assert rows[1]["sampling"]["seed"] == 2
    assert stub.requests[0]["chat_template_kwargs"] == {"a": 1}
    assert "left out   1 conversations (1 failed): sub/answers.jsonl.left_out" in done.stdout
    assert "asked.jsonl:2: HTTP 400 'no b'" in done.stdout
    assert "HTTP Request" not in done.stdout + done.stderr
    assert "secret" not in done.stdout + (tmp_path / "sub" / "answers.jsonl").read_text()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_a_signal_loses_nothing(stub, tmp_path, number):  # noqa: F811
    """A real one to a real process; the finished file is that of an undisturbed job."""

    gate = threading.Event()  # while it is shut, the second half stays without answers: the job is hit in the middle

    def behave(question, before):
        if int(question[1:]) >= 60:
            gate.wait(60)
        return stub.echo(question, before)

    stub.behave = behave
    data = asked(tmp_path, *({"question": f"q{n}"} for n in range(120)))
    settings = (f"server={stub.url}", data, "client.concurrency=2")
    gate.set()
    run("generate", *settings, "out=whole.jsonl", cwd=tmp_path)
    gate.clear()
    out = tmp_path / "answers.jsonl"
    start = command("generate", *settings, "out=answers.jsonl")
    job = subprocess.Popen(start, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while (not out.exists() or len(out.read_bytes().splitlines()) < 20) and job.poll() is None:
        time.sleep(0.01)
    job.send_signal(number)
    printed, _ = job.communicate(timeout=60)
    gate.set()
    assert 20 <= len(answers(tmp_path)) < 120
    if number == signal.SIGINT:
        assert job.returncode == 130
        assert f"Continue with: eaglelab generate server={stub.url} data.path=asked.jsonl" in printed
    run("generate", *settings, "out=answers.jsonl", cwd=tmp_path)
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([BUNDLED], 'give one of prompt="a question" and data=FILE.jsonl'),
        ([BUNDLED, "prompt=a", "data=asked.jsonl"], "give one of"),
        ([BUNDLED, "data=asked.jsonl"], "needs out=FILE.jsonl"),
        ([BUNDLED, "prompt=a", "out=a.jsonl"], "go with data="),
        (["server=http://localhost:1/v1", "prompt=a"], "go with data="),
        (["data=asked.jsonl", "out=a.jsonl"], "who answers?"),
        ([BUNDLED, "server=http://localhost:1/v1", "data=asked.jsonl", "out=a.jsonl"], "either a server answers"),
        (["server=http://localhost:1/v1", "data=asked.jsonl", "out=a.jsonl"], "is not reachable"),
        (["server=here", "data=asked.jsonl", "out=a.jsonl"], "server=here is no address"),
        (["server={stub}", "model=gpt", "data=asked.jsonl", "out=a.jsonl"], "has stub: model=gpt is not among them"),
        (["server={stub}", "data=asked.jsonl", "out=a.jsonl", "client.retries=-1"], "client.retries=-1"),
        (["server={stub}", "data=asked.jsonl", "out=a.jsonl", "client.retry=1"], "retry"),
        (["server={stub}", "data=asked.jsonl", "out=a.json"], "name it .jsonl"),
        (["server={stub}", "data=asked.jsonl", "out=asked.jsonl"], "asked.jsonl:1 is no row"),
        (["server={stub}", "data=asked.jsonl", "out=a.jsonl", "keep=most"], "keep='most'"),
        (["server={stub}", "data=asked.jsonl", "out=a.jsonl", "temperature=-1"], "temperature=-1"),
        (["server={stub}", "data=missing.jsonl", "out=a.jsonl"], "missing.jsonl: no such file"),
        (["server={stub}", "data=empty.jsonl", "out=a.jsonl"], "empty.jsonl: holds no conversation"),
        (["server={stub}", "data=twice.jsonl", "out=a.jsonl"], "more than one prompt has the id '1'"),
        (["run=/nope", "data=asked.jsonl", "out=a.jsonl"], "run=/nope does not exist"),
    ],
)
def test_bad_input_ends_in_one_message(arguments, message, stub, tmp_path):  # noqa: F811
    asked(tmp_path, {"question": "a"})
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "twice.jsonl").write_text('{"id": 1, "question": "a"}\n{"id": 1, "question": "b"}\n')
    done = run("generate", *[one.format(stub=stub.url) for one in arguments], cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "a.jsonl").exists()
