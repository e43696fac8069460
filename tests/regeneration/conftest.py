"""A stub of an OpenAI-compatible server that can misbehave, and a tiny engine that can chat."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from eaglelab.data.conversations import Conversation
from eaglelab.decoding import Chain, Engine
from eaglelab.drafters import DrafterConfig, FeatureDrafter, SlotDrafter
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import tiny_llama
from tests.target.target_tokenizer import tiny_tokenizer

MODEL = "stub"


def prompts(*questions: str | tuple[str, ...]) -> list[Conversation]:
    """Prompts named p0, p1 ...; a tuple holds several turns."""
    turns = [(one,) if isinstance(one, str) else one for one in questions]
    return [
        Conversation(f"p{i}", tuple({"role": "user", "content": text} for text in texts))
        for i, texts in enumerate(turns)
    ]


def completion(text: str | None, reason: str = "stop", tokens: int = 3) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": tokens}}).encode()


class Stub:
    """Answers `echo: QUESTION`, unless `behave` says otherwise.

    Attributes:
        behave: (question, how often it came before) -> status, headers and body; None drops the connection.
        models, need_key: what /models lists, and the key without which it refuses.
        requests: the bodies that came, in order.
        most_at_once: requests that were open together at most.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.behave: Callable[[str, int], tuple[int, dict, bytes] | None] = self.echo
        self.models: object = [MODEL]
        self.need_key: str | None = None
        self.requests: list[dict] = []
        self.asked_for_models = 0
        self.most_at_once = 0
        self.open = 0
        self.lock = threading.Lock()

    @staticmethod
    def echo(question: str, before: int) -> tuple[int, dict, bytes]:
        return 200, {}, completion(f"echo: {question}")

    def count(self, question: str) -> int:
        return sum(body["messages"][-1]["content"] == question for body in self.requests)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.stub.asked_for_models += 1
        if self.path != "/v1/models":
            self.reply(404, {}, b'{"detail": "Not Found"}')
        elif self.stub.need_key and self.headers.get("Authorization") != f"Bearer {self.stub.need_key}":
            self.reply(401, {}, b'{"error": {"message": "Incorrect API key"}}')
        else:
            self.reply(200, {}, json.dumps({"data": [{"id": name} for name in self.stub.models]}).encode())

    def do_POST(self):
        stub = self.stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with stub.lock:
            before = stub.count(question)
            stub.requests.append(body)
            stub.open += 1
            stub.most_at_once = max(stub.most_at_once, stub.open)
        try:
            reply = stub.behave(question, before)
        finally:
            with stub.lock:
                stub.open -= 1
        if reply is None:
            self.close_connection = True
        else:
            self.reply(*reply)

    def reply(self, status, headers, body):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def stub() -> Iterator[Stub]:
    handler = type("OwnHandler", (Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.stub = Stub(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield handler.stub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="session")
def chatting_target() -> FrozenTarget:
    """Tiny and random; as many tokens as its tokenizer has, so that some answers end and some do not."""
    tokenizer = tiny_tokenizer()
    return FrozenTarget(tiny_llama(len(tokenizer), seed=5, positions=96), tokenizer)


@pytest.fixture(scope="session")
def plain_engine(chatting_target) -> Engine:
    return Engine(chatting_target)


@pytest.fixture(scope="session")
def drafting_engine(chatting_target) -> Engine:
    torch.manual_seed(1)
    network = FeatureDrafter(DrafterConfig.from_target(chatting_target.text_config))
    drafter = SlotDrafter(network, chatting_target, ("final",))
    return Engine(chatting_target, drafter, Chain(3))


def interrupting(source, last):
    """``source``, with Ctrl-C when ``last`` conversations have ended."""
    answer = source.answer

    def stopped(asked, done, watcher):
        ended, count = watcher.ended, 0

        def watched(one):
            nonlocal count
            ended(one)
            count += 1
            if count == last:
                signal.raise_signal(signal.SIGINT)

        watcher.ended = watched
        answer(asked, done, watcher)

    source.answer = stopped
    return source
