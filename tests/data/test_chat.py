"""Answer masks against what each template's model has to emit, written out by hand."""

import os
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from eaglelab.data import encode_prompt, tokenize_chat, with_chat_template

GENERATION_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}" + GENERATION_PROMPT
)


def _marked(answer: str) -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if m['role'] == 'assistant' %}" + answer + "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
        "{{ '\\n' }}{% endfor %}" + GENERATION_PROMPT
    )


CHATML_MARKED = _marked("{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}")
CHATML_MARKED_TEXT_ONLY = _marked("{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}")
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set chat = messages[1:] %}"
    "{% set head = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% else %}{% set chat = messages %}{% set head = '' %}{% endif %}"
    "{% for m in chat %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (head if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}"
    "{{ m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# reasoning of all but the last answer is dropped; the last one always shows a reasoning block
REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' %}{% set answer = text.split('</think>')[-1].lstrip('\\n') %}"
    "{% if loop.last %}{% set parts = text.split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1] if parts | length > 1 else '\\n' %}"
    "{{ '<think>' + thought + '</think>\\n\\n' + answer }}{% else %}{{ answer }}{% endif %}"
    "{% else %}{{ text }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}" + GENERATION_PROMPT
)
NO_GENERATION_PROMPT = CHATML.removesuffix(GENERATION_PROMPT)
PLAIN = (
    "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# name: (template, eos token, what follows the answer text)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", "<|im_end|>"),
    "chatml_marked": (CHATML_MARKED, "<|im_end|>", "<|im_end|>"),
    "chatml_marked_text_only": (CHATML_MARKED_TEXT_ONLY, "<|im_end|>", "<|im_end|>"),
    "chatml_no_generation_prompt": (NO_GENERATION_PROMPT, "<|im_end|>", "<|im_end|>"),
    "chatml_other_eos": (CHATML, "</s>", "<|im_end|>"),
    "smollm2": (SMOLLM2, "<|im_end|>", "<|im_end|>"),
    "llama2": (LLAMA2, "</s>", " </s>"),
    "llama3": (LLAMA3, "<|eot_id|>", "<|eot_id|>"),
    "gemma": (GEMMA, "</s>", "<end_of_turn>"),
    "phi3": (PHI3, "<|endoftext|>", "<|end|>"),
}
MARKED = [name for name in TEMPLATES if "marked" in name]


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system is not None else []
    return head + [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]


def supervised(tokenizer, messages) -> list[str]:
    """Text of every run of answer tokens."""
    tokenized = tokenize_chat(tokenizer, messages)
    assert tokenized.input_ids.dtype == np.int32
    assert tokenized.answer_mask.dtype == np.bool_
    assert len(tokenized.input_ids) == len(tokenized.answer_mask)
    pairs = zip(tokenized.answer_mask.tolist(), tokenized.input_ids.tolist())
    runs = [(flag, [token for _, token in group]) for flag, group in groupby(pairs, key=lambda pair: pair[0])]
    return [tokenizer.decode(ids) for flag, ids in runs if flag]


@pytest.fixture(params=list(TEMPLATES))
def case(request, make_tokenizer):
    """(tokenizer, text in front of an answer that the model emits, text behind it)."""
    template, eos, end = TEMPLATES[request.param]
    return make_tokenizer(template, eos), (" " if request.param == "llama2" else ""), end


@pytest.mark.parametrize(
    "turns",
    [
        ("hello", "he went home."),
        ("a", "one", "b", "two", "c", "three"),
        ("same", "same", "same", "same"),
        ("party 🎉?", "yes 👩‍👩‍👧 ünïcode 漢字"),
        (
            "what ends a turn?",
            "text <|im_end|>\n<|im_start|>user\nfake</s> [/INST] <|eot_id|> <end_of_turn> end",
        ),
        ("split", "ab\n\n  cd  ef"),
        ("q", "unanswered follows", "and now?"),
    ],
    ids=["single", "multi", "equal_texts", "emoji", "separators_inside", "white_space", "open_end"],
)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_answers_and_end_of_turn(case, turns, system):
    tokenizer, front, end = case
    assert supervised(tokenizer, chat(*turns, system=system)) == [front + answer + end for answer in turns[1::2]]


def test_empty_answer_supervises_its_end_of_turn(case):
    tokenizer, front, end = case
    runs = supervised(tokenizer, chat("q", "", "again", "ok"))
    assert [run.strip() for run in runs] == [end.strip(), (front + "ok" + end).strip()]


def test_ids_are_the_templates_own(case):
    tokenizer, _, _ = case
    messages = chat("q one", "a one", "q two", "a two", system="s")
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert tokenize_chat(tokenizer, messages).input_ids.tolist() == expected


@pytest.mark.parametrize("name", ["chatml", "chatml_marked", "smollm2", "llama3", "gemma", "phi3"])
def test_prompt_ends_where_the_answer_starts(make_tokenizer, name):
    template, eos, _ = TEMPLATES[name]
    tokenizer = make_tokenizer(template, eos)
    messages = chat("q one", "a one", "q two", "a two")
    tokenized = tokenize_chat(tokenizer, messages)
    starts = np.flatnonzero(np.diff(tokenized.answer_mask.astype(int)) == 1) + 1
    for end, start in zip((1, 3), starts):
        prompt = encode_prompt(tokenizer, messages[:end])
        assert prompt == tokenized.input_ids[: len(prompt)].tolist()
        assert len(prompt) == start


@pytest.mark.parametrize("name", ["llama2", "llama3", "gemma"])
def test_template_that_strips_contents(make_tokenizer, name):
    template, eos, end = TEMPLATES[name]
    front = " " if name == "llama2" else ""
    runs = supervised(make_tokenizer(template, eos), chat("  q ", " \n an answer \n\n", "q", "  b"))
    assert runs == [front + "an answer" + end, front + "b" + end]


def test_template_that_drops_earlier_reasoning(make_tokenizer):
    messages = chat("q", "<think>\nfirst thought\n</think>\n\none", "q", "<think>\nsecond\n</think>\n\ntwo")
    assert supervised(make_tokenizer(REASONING), messages) == [
        "one<|im_end|>",
        "<think>\nsecond\n</think>\n\ntwo<|im_end|>",
    ]


def test_template_that_adds_a_reasoning_block(make_tokenizer):
    """What follows the generation prompt is the model's to emit, written by the template or not."""
    runs = supervised(make_tokenizer(REASONING), chat("q", "one", "q", "two"))
    assert runs == ["one<|im_end|>", "<think>\n</think>\n\ntwo<|im_end|>"]


def test_template_without_end_of_turn_token(make_tokenizer):
    assert supervised(make_tokenizer(PLAIN, "</s>"), chat("q", "one", "q", "two")) == [" one", " two"]


def test_special_tokens_of_the_next_turn_are_not_an_end_of_turn(make_tokenizer):
    """A user text that starts with EOS, and a header token right behind the answer."""
    tokenizer = make_tokenizer(PLAIN, "</s>")
    assert supervised(tokenizer, chat("q", "one", "</s>", "two")) == [" one", " two"]
    headers = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    )
    assert supervised(make_tokenizer(headers, "</s>"), chat("q", "one", "q", "two")) == ["one", "two"]


def test_eos_written_by_the_next_turn_ends_the_answer(make_tokenizer):
    late = "{% for m in messages %}{% if m['role'] == 'user' and not loop.first %}{{ eos_token }}{% endif %}"
    template = late + "{{ m['role'] + ': ' + m['content'] }} {% endfor %}"
    runs = supervised(make_tokenizer(template, "</s>"), chat("q", "one", "q", "two"))
    assert runs == ["one </s>", "two"]


def test_white_space_tokens_with_trimmed_offsets_are_kept(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    offsets = tokenizer("a    b", return_offsets_mapping=True)["offset_mapping"]
    assert any(start == stop for start, stop in offsets), "the case needs zero-width offsets"
    assert supervised(tokenizer, chat("q", "a    b", "q", "c  ")) == ["a    b<|im_end|>", "c  <|im_end|>"]


def test_token_across_the_border_belongs_to_the_answer(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    assert supervised(tokenizer, chat("q", "\nleading")) == ["\n\nleading<|im_end|>"]


def test_chat_that_starts_with_the_assistant(case):
    tokenizer, _, end = case
    messages = chat("q", "one")[1:] + chat("q", "two")
    if "INST" in tokenizer.chat_template:
        with pytest.raises(ValueError, match=r"rejects a chat with the roles assistant, user, assistant.*alternate"):
            tokenize_chat(tokenizer, messages)
    else:
        assert supervised(tokenizer, messages) == ["one" + end, "two" + end]


def test_chat_without_answer_supervises_nothing(chatml):
    assert supervised(chatml, chat("only a question")) == []


def test_markers_decide_which_turns_count(make_tokenizer):
    only_last = _marked(
        "{% if loop.last %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    )
    assert supervised(make_tokenizer(only_last), chat("q", "one", "q", "two")) == ["two<|im_end|>"]


def test_missing_template_names_the_way_out(make_tokenizer):
    tokenizer = make_tokenizer(None)
    with pytest.raises(ValueError, match=r"no chat template; .*chat_template=FILE"):
        tokenize_chat(tokenizer, chat("q", "a"))
    with pytest.raises(ValueError, match=r"no chat template; .*chat_template=FILE"):
        encode_prompt(tokenizer, chat("q"))


def test_template_that_hides_answers_is_an_error(make_tokenizer):
    hides = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match=r"cannot find the assistant's answers.*generation"):
        tokenize_chat(make_tokenizer(hides), chat("q", "a"))


def test_template_from_a_file(make_tokenizer, tmp_path):
    bare = make_tokenizer(None)
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    assert supervised(with_chat_template(bare, file), chat("q", "a")) == ["a<|im_end|>"]
    assert bare.chat_template is None
    with pytest.raises(ValueError, match=r"chat_template=.*nope.*no such file"):
        with_chat_template(bare, tmp_path / "nope")
    file.write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        with_chat_template(bare, file)


TEXT = st.text(st.sampled_from("ab .\n🎉") | st.characters(exclude_categories=["Cs"]), max_size=12)
PIECE = TEXT | st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "[/INST]", "</s>", "<|eot_id|>\n"])
CONTENT = st.lists(PIECE, max_size=4).map("".join)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4), name=st.sampled_from(list(TEMPLATES)))
def test_any_chat_any_template(make_tokenizer, turns, name):
    """Decoded runs, white space at their borders aside, are the rendered answers with their ends."""
    template, eos, end = TEMPLATES[name]
    strips = name in ("llama2", "llama3", "gemma")
    tokenizer = make_tokenizer(template, eos)
    messages = chat(*(text for turn in turns for text in turn))
    expected = [(answer.strip() if strips else answer) + end for _, answer in turns]
    assert [run.strip() for run in supervised(tokenizer, messages)] == [text.strip() for text in expected]


@pytest.mark.slow
def test_real_smollm2():
    """SmolLM2-135M-Instruct's template and tokenizer, from the .gguf that EAGLELAB_SMOLLM2 names."""
    file = Path(os.environ["EAGLELAB_SMOLLM2"])
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer.chat_template == SMOLLM2.replace("\\n", "\n")
    turns = ("Hi 🎉", "Hello! <|im_end|> ends a turn.", "Why?", "Because.\n\nSo.  ")
    assert supervised(tokenizer, chat(*turns)) == [answer + "<|im_end|>" for answer in turns[1::2]]
    assert (
        encode_prompt(tokenizer, chat("Hi"))
        == tokenizer.apply_chat_template(chat("Hi"), add_generation_prompt=True, return_dict=True)["input_ids"]
    )
