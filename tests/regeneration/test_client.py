"""One request: what is asked again, how long is waited, and what ends it."""

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx2
import pytest

from eaglelab.regeneration import Client, ClientSettings, PromptFailed
from eaglelab.regeneration.client import retry_after, said
from tests.regeneration.conftest import MODEL, completion

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "q"}]}
WELL = completion("fine")


def ask(stub, waits=None, **settings):
    """(answer, seconds that would have been waited before each further attempt)"""
    waited = [] if waits is None else waits

    async def sleep(seconds):
        waited.append(seconds)

    async def run():
        async with Client(stub.url, ClientSettings(**settings), sleep=sleep) as client:
            return await client.answer(BODY)

    return asyncio.run(run()), waited


def first(*troubles):
    """These, one after the other, then a good answer."""
    return lambda question, before: troubles[before] if before < len(troubles) else (200, {}, WELL)


TROUBLES = {
    "http 500 twice": [(500, {}, b"oops"), (500, {}, b"")],
    "busy": [(429, {}, b'{"error": {"message": "slow down"}}')],
    "loading": [(503, {}, b"")],
    "gateway": [(502, {}, b"<html>Bad Gateway</html>"), (504, {}, b"")],
    "timeout of the server": [(408, {}, b"")],
    "dropped connection": [None],
    "no JSON": [(200, {}, b"{ no json")],
    "other JSON": [(200, {}, b'{"choices": []}'), (200, {}, b"[]"), (200, {}, b'{"choices": [{"message": "x"}]}')],
    "cut body": [(200, {"Content-Length": str(len(WELL)), "Connection": "close"}, WELL[: len(WELL) // 2])],
    "cut chunks": [(200, {"Content-Length": "", "Transfer-Encoding": "chunked", "Connection": "close"}, b"20\r\n{")],
    "broken compression": [(200, {"Content-Encoding": "gzip"}, b"not gzip")],
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_troubles_that_pass_are_sat_out(stub, trouble):
    stub.behave = first(*TROUBLES[trouble])
    answer, waits = ask(stub, retries=3)
    assert (answer.text, answer.tokens, answer.stop_reason) == ("fine", 3, "eos")
    assert len(stub.requests) == len(waits) + 1 == len(TROUBLES[trouble]) + 1


def test_waits_double_up_to_a_minute_and_are_shortened_by_chance(stub):
    stub.behave = first(*[(500, {}, b"")] * 9)
    _, waits = ask(stub, retries=9)
    for wait, longest in zip(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=True):
        assert longest / 2 <= wait <= longest
    assert len({round(wait / longest, 6) for wait, longest in zip(waits[6:], [60] * 3)}) > 1


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_obeyed(stub, form):
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=120), usegmt=True)
    stub.behave = first((429, {"Retry-After": "100" if form == "seconds" else at}, b""))
    answer, (wait,) = ask(stub, wait=0)
    assert answer.text == "fine"
    assert 95 <= wait <= 135


def test_retry_after_holds_back_all_requests(stub):
    stub.behave = lambda question, before: first(*[(503, {"Retry-After": "50"}, b"")] * (question == "q"))("", before)
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def run():
        async with Client(stub.url, ClientSettings(), sleep=sleep) as client:
            await client.answer(BODY)
            await client.answer(BODY | {"messages": [{"role": "user", "content": "another"}]})

    asyncio.run(run())
    assert [40 < wait < 60 for wait in waits] == [True, True]


@pytest.mark.parametrize("value", ["", "soon", "-5", "1e3"])
def test_retry_after_that_is_none(value):
    assert retry_after(httpx2.Response(429, headers={"Retry-After": value})) is None
    assert retry_after(httpx2.Response(429)) is None


def test_a_date_in_the_past_means_now():
    assert retry_after(httpx2.Response(429, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})) == 0


def test_a_slow_answer_is_given_up_and_asked_again(stub):
    import time

    stub.behave = lambda question, before: (time.sleep(0.4 if before == 0 else 0), (200, {}, WELL))[1]
    answer, waits = ask(stub, timeout=0.15)
    assert (answer.text, len(waits)) == ("fine", 1)


def test_attempts_end(stub):
    stub.behave = lambda question, before: (500, {}, b'{"message": "engine died"}')
    with pytest.raises(PromptFailed, match=r"HTTP 500 'engine died' \(attempt 3 of 3\)"):
        ask(stub, retries=2)
    assert len(stub.requests) == 3
    stub.behave = lambda question, before: None
    with pytest.raises(PromptFailed, match=r"RemoteProtocolError(?s:.*)\(attempt 1 of 1\)"):
        ask(stub, retries=0)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_the_server_does_not_accept_is_not_asked_again(stub, status):
    stub.behave = lambda question, before: (status, {}, b'{"error": {"message": "maximum context length is 512"}}')
    with pytest.raises(PromptFailed, match=f"HTTP {status} 'maximum context length is 512'"):
        ask(stub)
    assert len(stub.requests) == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_the_job(stub, status):
    stub.behave = lambda question, before: (status, {}, b"")
    with pytest.raises(ValueError, match=f"refuses the key: HTTP {status}(?s:.*)OPENAI_API_KEY"):
        ask(stub)


def test_an_unknown_model_ends_the_job_with_the_servers_models(stub):
    stub.models = ["one", "two"]
    stub.behave = lambda question, before: (404, {}, b'{"message": "The model `stub` does not exist."}')
    with pytest.raises(ValueError, match="does not answer for model=stub(?s:.*)does not exist(?s:.*)it has one, two"):
        ask(stub)


def test_other_statuses_end_the_job(stub):
    stub.behave = lambda question, before: (307, {"Location": "/elsewhere"}, b"")
    with pytest.raises(ValueError, match="cannot be used: HTTP 307"):
        ask(stub)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b'{"error": {"message": "m"}}', " 'm'"),
        (b'{"error": "e"}', " 'e'"),
        (b'{"message": "m"}', " 'm'"),
        (b'{"detail": "d"}', " 'd'"),
        (b"plain", " 'plain'"),
        (b"", ""),
        (b"{}", ""),
    ],
)
def test_what_servers_say(reply, words):
    assert said(httpx2.Response(400, content=reply)) == words


@pytest.mark.parametrize(("reason", "known_as"), [("stop", "eos"), ("length", "length"), ("content_filter",) * 2])
def test_reasons(stub, reason, known_as):
    stub.behave = lambda question, before: (200, {}, completion("x", reason))
    assert ask(stub)[0].stop_reason == known_as


def test_answers_without_text_or_usage(stub):
    stub.behave = lambda question, before: (200, {}, completion(None, "tool_calls"))
    with pytest.raises(PromptFailed, match=r"without text \(finish_reason tool_calls\)"):
        ask(stub)
    stub.behave = lambda question, before: (200, {}, WELL.replace(b"usage", b"other"))
    assert ask(stub)[0].tokens is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "client.concurrency=0"),
        ({"retries": -1}, "client.retries=-1"),
        ({"wait": -1}, "client.wait=-1"),
        ({"timeout": 0}, "client.timeout=0"),
        ({"max_failures": 0}, "client.max_failures=0"),
        ({"body": {"temperature": 1}}, "client.body has temperature"),
        ({"body": {"stream": True}}, "client.body has stream"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        ClientSettings(**settings)
