"""The evaluation loop over a tiny target and scripted drafters."""

import importlib
import json
from pathlib import Path

import pytest

import eaglelab
from eaglelab.data.conversations import Conversation
from eaglelab.decoding import Chain, Engine, Sampling, StaticTree
from eaglelab.evaluation import Settings, evaluate, load_prompts
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import ScriptDrafter, drafts, hf_greedy, tiny_llama

VOCAB = 61
QUIET = {"progress": False, "warmup": 0}


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB, positions=96))


def encode(messages):
    """Every chat opens with token 7; letters are ids, an answer is written as numbers."""
    ids = [7]
    for message in messages:
        text = message["content"]
        ids += [int(n) for n in text.split()] if text[0].isdigit() else [ord(c) % 61 for c in text]
    return ids


def decode(ids):
    return " ".join(map(str, ids))


def prompt(name, *turns, category=""):
    messages = tuple({"role": "user", "content": turn} for turn in turns)
    return Conversation(name, messages, category=category)


PROMPTS = [prompt("a", "hello", "more"), prompt("b", "what is it", category="qa"), prompt("c", "x")]


def run(target, kind="noisy", tree=None, prompts=PROMPTS, encode=encode, on_record=None, **settings):
    drafter = ScriptDrafter(drafts(kind, target.model, VOCAB), 7)
    return evaluate(
        target,
        drafter,
        tree or StaticTree(),
        prompts,
        Settings(**QUIET | {"max_new_tokens": 16, "ignore_eos": True} | settings),
        encode=encode,
        decode=decode,
        on_record=on_record,
    )


def test_metrics_have_the_promised_keys(target):
    metrics = run(target, check_generate=True).to_dict()
    metrics = json.loads(json.dumps(metrics))
    promised = "tau tokens_per_s baseline_tokens_per_s speedup rounds accepted_by_depth identical"
    assert set(promised.split()) | {"settings", "versions", "per_prompt"} <= set(metrics)
    assert metrics["identical"] == metrics["identical_to_generate"] == {"count": 3, "of": 3}
    assert metrics["new_tokens"] == 3 * 16
    assert [turn["id"] for turn in metrics["per_prompt"]] == ["a", "b", "c"]
    assert metrics["settings"]["tree"] == {
        "name": "static",
        "nodes": 25,
        "depth": 5,
        "paths": "eagle1_25",
    }
    assert metrics["settings"]["taps"] == ["final"]
    assert {"eaglelab", "torch", "transformers", "python"} == set(metrics["versions"])
    assert not metrics["partial"]
    assert metrics["tokens_per_s"] > 0
    assert metrics["seconds"]["decode"] > 0
    assert sum(metrics["time_split"].values()) == pytest.approx(1)


def test_a_perfect_drafter_scores_its_depth(target):
    metrics = run(target, "perfect", Chain(4), max_new_tokens=1 + 3 * 5).to_dict()
    assert metrics["tau"] == 5
    assert metrics["accepted_by_depth"] == [1, 1, 1, 1]
    assert metrics["rounds"] == 9
    assert metrics["tokens_per_round"] == 5


def test_no_tree_is_plain_decoding_on_both_sides(target):
    drafterless = evaluate(
        target, None, None, PROMPTS, Settings(**QUIET, max_new_tokens=8), encode=encode, decode=decode
    ).to_dict()
    assert drafterless["tau"] == 1
    assert drafterless["drafted_nodes"] == 0
    assert drafterless["identical"] == {"count": 3, "of": 3}
    assert drafterless["settings"]["tree"] == {"name": "none"}


def test_second_turns_follow_the_models_own_answers(target):
    """Turn 2's prompt is turn 1, the target's answer to it, then the new question."""
    chats = []

    def spying(messages):
        chats.append([(message["role"], message["content"]) for message in messages])
        return encode(messages)

    metrics = run(target, encode=spying, turns="all", max_new_tokens=6).to_dict()
    assert [(t["id"], t["turn"]) for t in metrics["per_prompt"]] == [
        ("a", 1),
        ("a", 2),
        ("b", 1),
        ("c", 1),
    ]
    first = encode([{"content": "hello"}])
    answer = hf_greedy(target.model, first, 6)
    asked = [("user", "hello"), ("assistant", decode(answer)), ("user", "more")]
    assert chats[:2] == [asked[:1], asked]
    second = first + answer + encode([{"content": "more"}])[1:]
    assert metrics["per_prompt"][1]["prompt_tokens"] == len(second)
    assert metrics["identical"] == {"count": 4, "of": 4}


def test_system_messages_come_along(target):
    chat = Conversation("s", ({"role": "system", "content": "be"}, {"role": "user", "content": "hello"}))
    metrics = run(target, prompts=[chat]).to_dict()
    assert [t["prompt_tokens"] for t in metrics["per_prompt"]] == [1 + 2 + 5]


def test_order_alternates_and_warmup_is_not_counted(target, monkeypatch):
    order = []
    real = Engine.generate

    def spy(self, *args, **kwargs):
        order.append("plain" if self.drafter is None else "draft")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", spy)
    result = run(target, warmup=1)
    assert order == ["draft", "plain"] * 2 + ["plain", "draft"] + ["draft", "plain"]
    assert len(result.turns) == 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=3)])
def test_a_batch_measures_what_single_prompts_do(target, sampling):
    """Same ids, same acceptance, later turns after each prompt's own earlier answers, skipped ones named."""
    asked = [*PROMPTS, prompt("long", "x" * 200), prompt("d", "one", "two", "three")]
    common = {"prompts": asked, "turns": "all", "sampling": sampling, "kind": "noisy"}
    alone, together = run(target, **common), run(target, batch=3, **common)
    keys = ("id", "turn", "prompt_tokens", "new_tokens", "stop_reason", "accepted", "drafted", "identical")
    key = lambda turn: (turn.id, turn.turn)  # noqa: E731
    for one, other in zip(sorted(alone.turns, key=key), sorted(together.turns, key=key), strict=True):
        assert {k: getattr(other, k) for k in keys} == {k: getattr(one, k) for k in keys}
        assert one.identical
    assert alone.skipped == together.skipped == [("long", "turn 1 has 201 tokens of 96")]
    assert together.prompts == len(asked)
    assert len(together.turns) == 7


def test_records_of_every_measured_round_and_of_no_other(target):
    records = []
    result = run(target, warmup=2, tree=Chain(3), on_record=records.append)
    accepted = {turn.id: turn.accepted for turn in result.turns}
    for name, counts in accepted.items():
        assert [r["accepted"] for r in records if r["id"] == name] == counts
    assert len(records) == sum(map(len, accepted.values()))
    assert len({r["request"] for r in records}) == 3
    for record in records:
        assert len(record["depth"]) == len(record["confidence"]) == len(record["node_accepted"]) == record["drafted"]
        assert sum(record["node_accepted"]) == record["reached"]
        assert record["experts_union"] is None


def test_an_interrupt_keeps_what_was_measured(target, monkeypatch):
    real, calls = Engine.generate, []

    def interrupted(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 4:  # second prompt, second side
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", interrupted)
    metrics = run(target).to_dict()
    assert metrics["partial"]
    assert [turn["id"] for turn in metrics["per_prompt"]] == ["a"]
    assert metrics["prompts"] == 1
    assert metrics["tau"] >= 1


def test_differences_are_counted_not_hidden(target, monkeypatch):
    real = Engine.generate

    def tampered(self, *args, **kwargs):
        results = real(self, *args, **kwargs)
        for result in results:
            if self.drafter is not None and result.prompt_length == 2:  # prompt "c"
                result.tokens[-1] = (result.tokens[-1] + 1) % VOCAB
        return results

    monkeypatch.setattr(Engine, "generate", tampered)
    result = run(target, check_generate=True)
    assert result.to_dict()["identical"] == {"count": 2, "of": 3}
    assert result.to_dict()["identical_to_generate"] == {"count": 2, "of": 3}
    assert [turn.identical for turn in result.turns] == [True, True, False]


def test_the_generate_check_is_plain_greedy():
    """Whatever end tokens and penalties the model's own generation config carries."""
    model = tiny_llama(VOCAB)
    answer = hf_greedy(model, encode(PROMPTS[2].messages), 16)
    model.generation_config.repetition_penalty = 1.8
    model.generation_config.eos_token_id = answer[4]
    metrics = run(FrozenTarget(model), prompts=PROMPTS[2:], check_generate=True).to_dict()
    assert metrics["identical_to_generate"] == {"count": 1, "of": 1}
    assert metrics["new_tokens"] == 16
    metrics = run(FrozenTarget(model), prompts=PROMPTS[2:], check_generate=True, ignore_eos=False).to_dict()
    assert metrics["identical_to_generate"] == {"count": 1, "of": 1}
    assert metrics["new_tokens"] == answer.index(answer[4]) + 1
    assert model.generation_config.repetition_penalty == 1.8


def test_prompts_without_room_are_reported(target):
    long = prompt("long", "y" * 96)
    metrics = run(target, prompts=[long, *PROMPTS]).to_dict()
    assert metrics["skipped"] == [{"id": "long", "reason": "turn 1 has 97 tokens of 96"}]
    assert metrics["answers"] == 3
    with pytest.raises(ValueError, match="no prompt left room.*97 tokens of 96"):
        run(target, prompts=[long])
    with pytest.raises(ValueError, match="there are no prompts"):
        run(target, prompts=[])


def test_context_limit_is_reached_identically(target):
    metrics = run(target, prompts=[prompt("p", "z" * 80)], max_new_tokens=50, check_generate=True)
    (turn,) = metrics.turns
    assert (turn.new_tokens, turn.stop_reason) == (15, "context")
    assert turn.identical
    assert turn.identical_to_generate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": Sampling(temperature=0.7), "check_generate": True}, "check_generate.*temperature=0"),
        ({"batch": 0}, "batch=0"),
        ({"turns": "second"}, "turns='second'"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


def test_a_target_without_tokenizer_needs_an_encoder(target):
    with pytest.raises(ValueError, match="no tokenizer.*encode="):
        evaluate(target, None, None, PROMPTS, Settings(**QUIET))


def test_bundled_target_and_prompts_need_nothing_else():
    """Tokenizer, chat template and end tokens are the target's own."""
    bundled = FrozenTarget.load("bundled")
    file = Path(eaglelab.__file__).parent / "assets" / "data" / "eval.jsonl"
    settings = Settings(**QUIET, max_new_tokens=12, check_generate=True)
    metrics = evaluate(bundled, None, None, load_prompts(file, limit=1), settings).to_dict()
    assert metrics["identical_to_generate"] == {"count": 1, "of": 1}
    assert metrics["settings"]["target"] == "bundled"


def test_plain_decoding_has_one_engine(target, monkeypatch):
    """What it recorded or compiled for the first answer serves all of them, as the drafter's does: else every baseline
    would take the time of a recording."""
    made = []

    class Counted(Engine):
        def __init__(self, *args, **settings):
            made.append(args)
            super().__init__(*args, **settings)

    monkeypatch.setattr(importlib.import_module("eaglelab.evaluation.evaluate"), "Engine", Counted)
    assert len(run(target).turns) == 3
    assert len(made) == 2
