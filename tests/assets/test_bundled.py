"""The bundled target and data: complete, small enough, and really trained."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from eaglelab.assets import bundled_data, bundled_target

# Of the first 20 answers of eval.jsonl, per answer token, as measured when the target was made.
RECORDED_PERPLEXITY = 2.371
MAX_BYTES = 20 * 2**20


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled_target())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(bundled_target(), dtype=torch.float32).eval()


def read(name) -> list[dict]:
    with open(bundled_data(name), encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def assistant_ids(tokenizer, messages) -> list[int]:
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return [token for token, is_answer in pairs if is_answer]


def test_folder_is_complete_and_small():
    folder = Path(bundled_target())
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
        "LICENSE",
        "training_log.csv",
    }
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES


def test_model_is_the_promised_size(model, tokenizer):
    assert model.config.model_type == "llama"
    assert model.config.num_hidden_layers >= 8
    assert model.config.max_position_embeddings == 2048
    assert model.config.vocab_size == len(tokenizer) == 2048
    assert 3e6 <= model.num_parameters() <= 8e6
    stored = AutoModelForCausalLM.from_pretrained(bundled_target(), dtype="auto")
    assert stored.dtype == torch.bfloat16


def test_unknown_data_name_is_refused():
    with pytest.raises(ValueError, match="train, val, eval"):
        bundled_data("test")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " leading, trailing ",
        "two  spaces\n\n\n  and\ttabs\r\n",
        "12345678901 0.5 ٣ ½ ² x10",
        "don 't re-join . these , please !",
        "日本語 Ελληνικά עברית 👩‍👩‍👧 e\u0301 \u200b \ufeff",
        "\x00\x01\x7f\U0010ffff",
        "<<48/2=24>>24\n#### 24",
    ],
)
def test_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_single_tokens(tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("costs 1234567.89 or 2024!")["input_ids"])
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("1234567892024")
    digits = [token for token in tokenizer.get_vocab() if any(c in "0123456789" for c in token)]
    assert sorted(digits) == list("0123456789")


def test_chat_template_marks_what_the_assistant_wrote(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "\n\n 4"},
        {"role": "user", "content": "<<1>>\n"},
        {"role": "assistant", "content": "#### 1"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n\n\n 4<|im_end|>\n<|im_start|>user\n<<1>>\n<|im_end|>\n"
        "<|im_start|>assistant\n#### 1<|im_end|>\n"
    )
    end = [tokenizer.eos_token_id]
    own = [tokenizer(message)["input_ids"] + end for message in ("\n\n 4", "#### 1")]
    assert assistant_ids(tokenizer, messages) == own[0] + own[1]

    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True)["input_ids"]
    assert prompt + own[0] == tokenizer.apply_chat_template(messages[:3])["input_ids"][:-1]


@torch.inference_mode()
def test_held_out_perplexity_is_the_recorded_one(model, tokenizer):
    nats, tokens = 0.0, 0
    for row in read("eval")[:20]:
        messages = [
            {"role": "user", "content": row["turns"][0]},
            {"role": "assistant", "content": row["reference"][0]},
        ]
        encoded = tokenizer.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True, return_tensors="pt"
        )
        answer_S = torch.as_tensor(encoded["assistant_masks"])[0, 1:].bool()
        logits_SV = model(encoded["input_ids"]).logits[0, :-1]
        targets_S = encoded["input_ids"][0, 1:]
        nats += F.cross_entropy(logits_SV[answer_S], targets_S[answer_S], reduction="sum").item()
        tokens += int(answer_S.sum())
    assert math.exp(nats / tokens) < 1.1 * RECORDED_PERPLEXITY


@torch.inference_mode()
def test_greedy_answer_is_a_worked_solution(model, tokenizer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": read("eval")[1]["turns"][0]}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, max_new_tokens=256, do_sample=False)[0]
    answer = tokenizer.decode(ids[prompt["input_ids"].shape[1] :])
    assert "<<" in answer and answer.endswith("<|im_end|>")
    assert answer.splitlines()[-1].startswith("#### ")


def test_questions_are_disjoint():
    train, val = ([row["messages"][0]["content"] for row in read(name)] for name in ("train", "val"))
    evaluation = [row["turns"][0] for row in read("eval")]
    assert len(train) > 3000 and len(val) > 150 and len(evaluation) == 200
    assert len({*train, *val, *evaluation}) == len(train) + len(val) + len(evaluation)


def test_rows_have_the_promised_shape():
    for name in ("train", "val"):
        for row in read(name):
            assert row.keys() == {"id", "messages"}
            assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    for number, row in enumerate(read("eval")):
        assert row.keys() == {"question_id", "category", "turns", "reference"}
        assert row["question_id"] == number and len(row["turns"]) == len(row["reference"]) == 1


@torch.inference_mode()
def test_shipped_answers_are_what_the_target_says(model, tokenizer):
    """Every answer token is the target's own greedy choice, up to near-ties of batched decoding."""
    rows = read("train")
    agree = total = 0
    for row in rows[:: len(rows) // 50]:
        encoded = tokenizer.apply_chat_template(
            row["messages"], return_assistant_tokens_mask=True, return_dict=True, return_tensors="pt"
        )
        answer_S = torch.as_tensor(encoded["assistant_masks"])[0, 1:].bool()
        choice_S = model(encoded["input_ids"]).logits[0, :-1].argmax(-1)
        agree += int((choice_S == encoded["input_ids"][0, 1:])[answer_S].sum())
        total += int(answer_S.sum())
    assert agree / total > 0.995
