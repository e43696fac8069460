"""Answers by a server: every prompt once, in any weather, and the file as if nothing had happened."""

import json
import random
import socket
import threading
import time

import pytest

from eaglelab.decoding import Sampling
from eaglelab.regeneration import ClientSettings, ServerSource, regenerate
from tests.regeneration.conftest import MODEL, completion, interrupting, prompts

PROMPTS = prompts("zero", "one", ("two a", "two b"), "three", "four", ("five a", "five b", "five c"), "six", "seven")
FAST = {"wait": 0.001, "retries": 2, "concurrency": 3}


def source(stub, model=MODEL, sampling=None, key=None, max_new_tokens=8, **settings):
    return ServerSource(
        stub.url,
        model,
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        settings=ClientSettings(**FAST | settings),
        key=key,
    )


def job(path, stub, asked=PROMPTS, keep="ended", **settings):
    path.parent.mkdir(exist_ok=True)
    return regenerate(source(stub, **settings), asked, path, keep=keep, progress=False)


def contents(path):
    return {file.name: file.read_bytes() for file in path.parent.glob("answers*")}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "answers.jsonl"


def test_answers_come_in_the_order_of_the_prompts(stub, out):
    stub.behave = lambda question, before: (time.sleep(random.random() / 50), stub.echo(question, before))[1]
    result = job(out, stub)
    assert [row["id"] for row in rows(out)] == [prompt.id for prompt in PROMPTS]
    assert [m["content"] for m in rows(out)[5]["messages"]] == [
        *("five a", "echo: five a", "five b", "echo: five b", "five c", "echo: five c")
    ]
    assert rows(out)[5]["tokens"] == 9
    assert rows(out)[0]["target"] == {"server": stub.url, "model": MODEL}
    assert (result.answers, result.tokens, result.tau) == (11, 33, None)
    (last,) = [body for body in stub.requests if body["messages"][-1]["content"] == "five c"]
    assert [m["content"] for m in last["messages"]] == ["five a", "echo: five a", "five b", "echo: five b", "five c"]


def test_every_setting_is_sent(stub, out):
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1, seed=100)
    job(out, stub, PROMPTS[:2], sampling=sampling, body={"chat_template_kwargs": {"enable_thinking": False}})
    sent = sorted(stub.requests, key=lambda body: body["seed"])
    assert sent[1] == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 101,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    row = rows(out)[1]
    assert row["sampling"] == {
        **{name: sent[1][name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")},
        "max_new_tokens": 8,
    }
    assert row["target"]["body"] == {"chat_template_kwargs": {"enable_thinking": False}}


def test_neutral_settings_are_sent_too_and_greedy_has_no_seed(stub, out):
    job(out, stub, PROMPTS[:1])
    assert stub.requests[0] == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "zero"}],
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def test_only_openais_own_fields_where_asked(stub, out):
    job(out, stub, PROMPTS[:1], extensions=False, sampling=Sampling(temperature=1.0))
    assert set(stub.requests[0]) == {"model", "messages", "max_tokens", "temperature", "top_p", "seed"}
    with pytest.raises(ValueError, match="client.extensions=false sends no top_k"):
        source(stub, extensions=False, sampling=Sampling(temperature=1.0, top_k=3))


def test_requests_are_bounded_and_as_many_as_allowed(stub, out):
    together = threading.Barrier(4)

    def behave(question, before):
        together.wait(timeout=10)
        return stub.echo(question, before)

    stub.behave = behave
    job(out, stub, prompts(*"abcdefgh"), concurrency=4)
    assert stub.most_at_once == 4


def weather(question, before):
    """Every question meets something, by its first letter; all answers come in the end."""
    trouble = {
        "z": [(429, {"Retry-After": "0"}, b"")],
        "o": [(500, {}, b""), (500, {}, b"")],
        "t": [None],
        "f": [(200, {}, b"{broken")],
        "s": [(200, {"Content-Length": "500", "Connection": "close"}, b"{")],
    }[question[0]]
    if before < len(trouble):
        return trouble[before]
    return 200, {}, completion(f"echo: {question}", "length" if question == "three" else "stop")


def test_bad_weather_changes_nothing(stub, tmp_path):
    good, bad = tmp_path / "good" / "answers.jsonl", tmp_path / "bad" / "answers.jsonl"
    stub.behave = lambda question, before: weather(question, 99)
    job(good, stub)
    stub.requests.clear()
    stub.behave = weather
    result = job(bad, stub)
    assert contents(bad) == contents(good)
    assert (result.failures, result.left_out) == ([], {"length": 1})


def test_a_prompt_that_fails_is_recorded_and_asked_again_by_the_next_job(stub, out):
    def behave(question, before):
        if question == "one":
            return 500, {}, b'{"error": {"message": "bad luck"}}'
        if question == "two b":
            return 400, {}, b'{"error": {"message": "too long"}}'
        return stub.echo(question, before)

    stub.behave = behave
    result = job(out, stub)
    assert sorted(result.failures) == [
        ("p1", "HTTP 500 'bad luck' (attempt 3 of 3)"),
        ("p2", "turn 2: HTTP 400 'too long'"),
    ]
    assert [row["id"] for row in rows(out)] == ["p0", "p3", "p4", "p5", "p6", "p7"]
    assert [row["reason"] for row in rows(out.with_name("answers.jsonl.left_out"))] == [
        "HTTP 500 'bad luck' (attempt 3 of 3)",
        "turn 2: HTTP 400 'too long'",
    ]
    stub.requests.clear()
    stub.behave = stub.echo
    job(out, stub)
    assert {body["messages"][0]["content"] for body in stub.requests} == {"one", "two a"}
    assert [row["id"] for row in rows(out)] == [prompt.id for prompt in PROMPTS]


def test_failures_in_a_row_end_the_job_and_what_there_was_stays(stub, out, tmp_path):
    job(tmp_path / "all" / "answers.jsonl", stub)
    stub.behave = lambda question, before: stub.echo(question, before) if question in ("zero", "one") else None
    with pytest.raises(ValueError, match=r"3 prompts in a row failed(?s:.*)2 answers of this job are saved in"):
        job(out, stub, max_failures=3, concurrency=1, retries=0)
    assert {row["id"] for row in rows(out)} == {"p0", "p1"}
    stub.behave = stub.echo
    job(out, stub)
    assert contents(out) == contents(tmp_path / "all" / "answers.jsonl")


def test_failures_between_answers_do_not_end_it(stub, out):
    stub.behave = lambda question, before: stub.echo(question, before) if int(question) % 2 else (400, {}, b"")
    result = job(out, stub, prompts(*map(str, range(20))), max_failures=2, concurrency=1)
    assert (len(result.failures), result.answers) == (10, 10)


def test_a_key_that_stops_working_ends_the_job_and_keeps_the_rows(stub, out):
    stub.behave = lambda question, before: stub.echo(question, before) if question != "four" else (401, {}, b"")
    with pytest.raises(ValueError, match=r"refuses the key(?s:.*)the same command continues"):
        job(out, stub, concurrency=1)
    assert [row["id"] for row in rows(out)] == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize("last", [1, 3, 5])
def test_interrupted_and_resumed(stub, tmp_path, last):
    job(tmp_path / "whole" / "answers.jsonl", stub)
    path = tmp_path / "cut" / "answers.jsonl"
    path.parent.mkdir()
    stopping = interrupting(source(stub), last)
    assert regenerate(stopping, PROMPTS, path, progress=False).interrupted
    there = len(rows(path))
    assert last <= there < len(PROMPTS)
    stub.requests.clear()
    job(path, stub)
    assert contents(path) == contents(tmp_path / "whole" / "answers.jsonl")
    assert len({body["messages"][0]["content"] for body in stub.requests}) == len(PROMPTS) - there


def test_the_same_model_on_another_host_continues_and_another_model_does_not(stub, out):
    job(out, stub, PROMPTS[:2])
    for line in (lines := out.read_text().splitlines()):
        assert stub.url in line
    out.write_text("".join(line.replace(stub.url, "http://node17:8000/v1") + "\n" for line in lines))
    job(out, stub)
    assert len(rows(out)) == len(PROMPTS)
    stub.models = ["other"]
    with pytest.raises(ValueError, match="field target.model was recorded as 'stub' but is 'other'"):
        job(out, stub, model="other")


# ---- a server that cannot be used ----------------------------------------------------------------------------------


def test_the_only_model_needs_no_name(stub):
    assert source(stub, model=None).origin.target["model"] == MODEL


@pytest.mark.parametrize(
    ("models", "model", "message"),
    [
        (["a", "b"], None, "has a, b: choose one with model="),
        (["a", "b"], "c", "has a, b: model=c is not among them"),
        ([], None, "has no model"),
    ],
)
def test_models_are_listed(stub, models, model, message):
    stub.models = models
    with pytest.raises(ValueError, match=message):
        source(stub, model=model)


def test_the_key_is_sent_and_its_absence_explained(stub):
    stub.need_key = "secret"
    with pytest.raises(ValueError, match="refuses the key: HTTP 401 'Incorrect API key'(?s:.*)client.key_variable"):
        source(stub)
    assert "secret" not in json.dumps(source(stub, key="secret").origin.record(0))


def test_an_address_without_v1(stub):
    stub.url = stub.url.removesuffix("/v1")
    with pytest.raises(ValueError, match="has no /models(?s:.*)usually ends in /v1"):
        source(stub)


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://x/v1", "http://"])
def test_no_address(stub, url):
    stub.url = url
    with pytest.raises(ValueError, match="server="):
        source(stub)


def test_nobody_listens(stub):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        stub.url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(ValueError, match="is not reachable(?s:.*)is it running"):
            source(stub)


def test_a_server_that_lists_nonsense(stub):
    stub.models = 5  # not iterable: the handler dies and the connection with it
    with pytest.raises(ValueError, match=r"cannot be used: RemoteProtocolError(?s:.*)attempt 3 of 3"):
        source(stub)


def test_max_new_tokens_out_of_range(stub):
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        source(stub, max_new_tokens=0)
