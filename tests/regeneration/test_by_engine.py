"""Answers by the engine: those of plain decoding, whatever helps it and however often it is interrupted."""

import json
import random

import pytest
from datasets import Dataset

from eaglelab.data import ConversationDataModule, encode_prompt, load_conversations, load_prompts
from eaglelab.decoding import Engine, Sampling
from eaglelab.regeneration import EngineSource, regenerate
from eaglelab.target import FrozenTarget
from tests.regeneration.conftest import prompts

SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7)
RULES = pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])


def texts(seed: int, count: int) -> list[str | tuple[str, ...]]:
    """Every third prompt has two or three turns."""
    draw = random.Random(seed)

    def text():
        return "".join(draw.choice("abcdefgh lo") for _ in range(draw.randint(2, 14)))

    return [tuple(text() for _ in range(draw.randint(2, 3))) if n % 3 == 2 else text() for n in range(count)]


PROMPTS = prompts(*texts(0, 24))


def job(path, engine, sampling=SAMPLED, asked=PROMPTS, *, batch=2, max_new_tokens=12, source=EngineSource, **settings):
    path.parent.mkdir(exist_ok=True)
    answers = source(engine, max_new_tokens=max_new_tokens, sampling=sampling, batch=batch)
    return regenerate(answers, asked, path, progress=False, **settings)


def contents(path):
    return {file.name: file.read_bytes() for file in path.parent.glob("answers*")}


def rows(path):
    lines = [path, path.with_name(f"{path.name}.left_out")]
    return {row["id"]: row for file in lines if file.exists() for row in map(json.loads, file.read_text().splitlines())}


@RULES
def test_answers_are_those_of_plain_decoding_turn_by_turn(plain_engine, tmp_path, sampling):
    job(tmp_path / "answers.jsonl", plain_engine, sampling)
    answered = rows(tmp_path / "answers.jsonl")
    tokenizer = plain_engine.target.tokenizer
    reasons = set()
    for number, prompt in enumerate(PROMPTS):
        messages, tokens, reason = [], 0, "eos"
        for question in prompt.messages:
            if reason != "eos":
                break
            messages.append(question)
            ids = encode_prompt(tokenizer, messages)
            one = sampling.with_seed(sampling.seed + number)
            result = plain_engine.generate_one(ids, max_new_tokens=12, sampling=one)
            text = tokenizer.decode(result.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            tokens, reason = tokens + len(result.tokens), result.stop_reason
        row = answered[prompt.id]
        assert (row["messages"], row["tokens"], row["stop_reason"]) == (messages, tokens, reason), prompt.id
        reasons |= {(reason, len(messages) // 2)}
    assert {("eos", 1), ("length", 1)} < reasons, "the test must see ended, cut and longer conversations"


@RULES
def test_a_drafter_and_the_batch_change_nothing(plain_engine, drafting_engine, tmp_path, sampling):
    job(tmp_path / "plain" / "answers.jsonl", plain_engine, sampling)
    result = job(tmp_path / "drafted" / "answers.jsonl", drafting_engine, sampling, batch=5)
    assert contents(tmp_path / "drafted" / "answers.jsonl") == contents(tmp_path / "plain" / "answers.jsonl")
    assert result.rounds > 0
    assert result.tau > 1


class Stopping(EngineSource):
    """Ctrl-C after `last` answers."""

    last = 0

    def answer(self, prompts, done, watcher):
        count = 0
        heard = watcher.answered

        def answered(tokens, accepted):
            nonlocal count
            heard(tokens, accepted)
            count += 1
            if count == self.last:
                raise KeyboardInterrupt

        watcher.answered = answered
        super().answer(prompts, done, watcher)


@RULES
def test_interrupted_at_any_answer_and_resumed(plain_engine, tmp_path, sampling):
    job(tmp_path / "whole" / "answers.jsonl", plain_engine, sampling)
    whole = contents(tmp_path / "whole" / "answers.jsonl")
    for last in (1, 9, 17, 20):
        path = tmp_path / str(last) / "answers.jsonl"
        source = type("At", (Stopping,), {"last": last})
        assert job(path, plain_engine, sampling, source=source).interrupted
        assert not job(path, plain_engine, sampling).interrupted
        assert contents(path) == whole, last


def test_an_interrupted_group_is_decoded_again_whole(plain_engine, tmp_path, monkeypatch):
    """So that every sequence shares its batches with the same ones as before, and rounding is the same."""
    asked = prompts(*["ab lo"] * 20)
    job(tmp_path / "answers.jsonl", plain_engine, asked=asked[:3], batch=1)
    calls = []
    real = Engine.generate

    def spy(self, prompts, **settings):
        calls.append(len(prompts))
        return real(self, prompts, **settings)

    monkeypatch.setattr(Engine, "generate", spy)
    result = job(tmp_path / "answers.jsonl", plain_engine, asked=asked, batch=1)
    assert calls == [8, 8, 4]
    assert result.answers == 17
    job(tmp_path / "answers.jsonl", plain_engine, asked=asked, batch=1)
    assert calls == [8, 8, 4], "finished groups are not decoded again"


def test_prompts_that_do_not_fit_are_recorded_and_the_others_answered(plain_engine, tmp_path):
    positions = plain_engine.target.max_positions
    asked = prompts("ab", "a" * positions, ("lo", "b" * positions), "c" * (positions - 2))
    result = job(tmp_path / "answers.jsonl", plain_engine, Sampling(), asked, keep="all", max_new_tokens=20)
    answered = rows(tmp_path / "answers.jsonl")
    assert answered["p0"]["stop_reason"] in ("eos", "length")
    assert answered["p1"]["reason"] == f"the prompt has {positions + 1} tokens and the target {positions} positions"
    assert answered["p2"]["stop_reason"] == "length" or answered["p2"]["reason"].startswith("turn 2: the prompt has")
    assert answered["p3"]["stop_reason"] == "context"
    assert answered["p3"]["tokens"] == 1
    assert dict(result.failures).keys() <= {"p1", "p2"}


def test_a_template_that_rejects_a_prompt_costs_only_that_prompt(chatting_target, tmp_path):
    tokenizer = chatting_target.tokenizer
    strict = type(tokenizer).from_pretrained(_saved(tokenizer, tmp_path / "tokenizer"))
    strict.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['content'] }}</s>{% endfor %}"
    )
    engine = Engine(FrozenTarget(chatting_target.model, strict))
    (prompt,) = prompts("ab")
    with_system = type(prompt)("s", ({"role": "system", "content": "lo"}, *prompt.messages))
    job(tmp_path / "answers.jsonl", engine, asked=[with_system, prompt])
    assert "no system" in rows(tmp_path / "answers.jsonl")["s"]["reason"]
    assert "p0" in rows(tmp_path / "answers.jsonl")


def _saved(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder


def test_a_target_that_cannot_chat_is_refused(chatting_target):
    with pytest.raises(ValueError, match="the target has no tokenizer"):
        EngineSource(Engine(FrozenTarget(chatting_target.model)), max_new_tokens=1, sampling=Sampling(), batch=1)


@pytest.mark.parametrize(("name", "value"), [("batch", 0), ("max_new_tokens", 0)])
def test_settings_out_of_range(plain_engine, name, value):
    settings = {"batch": 1, "max_new_tokens": 1} | {name: value}
    with pytest.raises(ValueError, match=f"{name}=0"):
        EngineSource(plain_engine, sampling=Sampling(), **settings)


def test_the_target_is_recorded(plain_engine):
    source = EngineSource(plain_engine, max_new_tokens=1, sampling=Sampling(), batch=1)
    fingerprint = plain_engine.target.fingerprint
    assert source.origin.target == {"source": "memory", "fingerprint": fingerprint.short, "dtype": "float32"}


def test_the_bundled_targets_answers_train(tmp_path):
    target = FrozenTarget.load("bundled")
    path = tmp_path / "questions.parquet"
    questions = ["A box holds 12 eggs. How many eggs are in 7 boxes?", "Tom has 3 apples and buys 4. How many?"]
    Dataset.from_dict({"question": questions}).to_parquet(path)
    out = tmp_path / "answers.jsonl"
    asked = load_prompts(path)
    result = job(out, Engine(target), Sampling(), asked, max_new_tokens=160, keep="all")
    assert [chat.id for chat in load_conversations(out)] == [prompt.id for prompt in asked]
    data = ConversationDataModule(target.tokenizer, out, max_length=512)
    data.setup()
    assert data.report.train.kept == 2
    ends = sum(row["stop_reason"] == "eos" for row in rows(out).values())
    assert data.report.train.answer_tokens - result.tokens == 2 - ends, "a cut answer gets an end that nobody said"
