"""Chats to token ids and answer masks, with any chat template.

The supervised part of a chat is what the model itself has to emit: the answer text and the token that
ends the turn, not the header in front. No template's separators are known here. The place of an answer is
*measured*: the chat is rendered a second time with a sentinel in place of that one answer, and what stands
before and after the sentinel is cut off the real text. This holds for templates that strip contents or drop
the reasoning of earlier turns, and for answers that contain the template's own separators. Where the
template has a generation prompt, the answer starts where that prompt ends. Templates with
``{% generation %}`` markers state the answers themselves; only the end-of-turn token is measured. One
tokenization of the whole text, with its offsets, then turns characters into tokens.

Letters: S tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eaglelab.data.conversations import Message

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE_WAY_OUT = "give a Jinja template with chat_template=FILE"


@dataclasses.dataclass(frozen=True)
class TokenizedChat:
    """A chat as the target reads it.

    Attributes:
        input_ids: int32 [S].
        answer_mask: bool [S], the token is part of an answer or ends one.
    """

    input_ids: NDArray[np.int32]
    answer_mask: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Character offsets of one answer [start, stop) and the rest of its turn [stop, turn_stop)."""

    start: int
    stop: int
    turn_stop: int


def tokenize_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> TokenizedChat:
    """Render ``messages`` with the tokenizer's chat template and mark the answer tokens.

    A token that overlaps an answer's characters belongs to it. The end-of-turn token is the first special
    token after the answer, if only white space lies between and the template wrote it as part of that turn
    (or it is the tokenizer's EOS); where there is none, the answer text alone is supervised.

    Raises:
        ValueError: no chat template, a template that rejects the chat or hides the answers, or a tokenizer
            without offsets; says what to do.
    """
    text = _render(tokenizer, messages)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} has no offset mapping, which the answer mask needs; load the "
            "fast tokenizer (a folder with tokenizer.json)"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets_S2 = encoded["input_ids"], np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    special = _special_ids(tokenizer, len(tokenizer))

    mask_S = np.zeros(len(ids), dtype=np.bool_)
    answers = _find_answers(tokenizer, messages, text)
    marked = _marked_spans(tokenizer, messages, text)
    if marked is None:
        for answer in answers:
            _mark(mask_S, offsets_S2, answer.start, answer.stop)
    else:
        for start, stop in marked:
            _mark(mask_S, offsets_S2, start, stop)
    for answer in answers:
        span_S = _overlap(offsets_S2, answer.start, answer.stop)
        if mask_S[span_S].any() or not span_S.any():  # markers may leave out a turn on purpose
            _mark_end_of_turn(mask_S, ids, offsets_S2, answer, text, special, tokenizer.eos_token_id)
    if marked is None and not answers and any(m["role"] == "assistant" for m in messages):
        raise ValueError(
            f"cannot find the assistant's answers in what the chat template of {_name(tokenizer)} renders; "
            "add {% generation %} markers to the template around each answer, or " + _TEMPLATE_WAY_OUT
        )
    return TokenizedChat(np.array(ids, dtype=np.int32), mask_S)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of ``messages`` and the generation prompt: what the target reads before it answers.

    Raises:
        ValueError: no chat template, or a template that rejects the chat.
    """
    text = _render(tokenizer, messages, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def with_chat_template(tokenizer: PreTrainedTokenizerBase, file: str | Path) -> PreTrainedTokenizerBase:
    """A copy of ``tokenizer`` that uses the Jinja template in ``file``.

    Raises:
        ValueError: the file is missing or empty.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template={file}: no such file")
    template = path.read_text(encoding="utf-8")
    if not template.strip():
        raise ValueError(f"chat_template={file}: the file is empty")
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False
) -> str:
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {_name(tokenizer)} has no chat template; {_TEMPLATE_WAY_OUT}")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template of {_name(tokenizer)} rejects a chat with the roles {roles}: {error}; "
            f"change the conversation, or {_TEMPLATE_WAY_OUT}"
        ) from error
    assert isinstance(text, str)
    return text


def _try_render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], add_generation_prompt: bool = False
) -> str | None:
    """The text, or None where the template rejects this part of a chat (often an empty one)."""
    try:
        return _render(tokenizer, messages, add_generation_prompt)
    except ValueError:
        return None


def _find_answers(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> list[_Answer]:
    """Answers in order. A turn that the template does not show has none."""
    sentinel = "Ixsentinelxi"
    while sentinel in text:
        sentinel += "xi"
    answers: list[_Answer] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answer = _measure(tokenizer, messages, i, text, sentinel)
        if answer is not None and (not answers or answers[-1].stop <= answer.start):
            answers.append(answer)
    return answers


def _measure(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], i: int, text: str, sentinel: str
) -> _Answer | None:
    before, after = _around(tokenizer, messages, i, len(messages), sentinel)
    is_last = i + 1 == len(messages)
    tail = after if is_last else _around(tokenizer, messages, i, i + 1, sentinel)[1]
    if after is not None and text.endswith(after):
        stop = len(text) - len(after)
    else:  # later text depends on this answer: measure in the chat that ends with it
        ending = _try_render(tokenizer, messages[: i + 1])
        if ending is None or not tail or not (ending.endswith(tail) and text.startswith(ending)):
            return None
        stop = len(ending) - len(tail)

    start = len(before) if before is not None and text.startswith(before) else None
    prompt = _try_render(tokenizer, messages[:i], add_generation_prompt=True) if i else None
    if prompt is not None and text.startswith(prompt) and len(prompt) != start:
        # A template that ignores add_generation_prompt leaves the header of the turn behind its prompt.
        ignored = prompt == _try_render(tokenizer, messages[:i])
        header_follows = ignored and start is not None and text[len(prompt) : start].strip()
        start = start if header_follows else len(prompt)
    if start is None or start > stop:
        return None
    return _Answer(start, stop, stop + _common(tail or "", text[stop:]))


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _around(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], i: int, stop: int, sentinel: str
) -> tuple[str | None, str | None]:
    """Text before and after message ``i`` in the rendering of ``messages[:stop]``."""
    replaced = [*messages[:i], {**messages[i], "content": sentinel}, *messages[i + 1 : stop]]
    parts = (_try_render(tokenizer, replaced) or "").split(sentinel)
    return (parts[0], parts[1]) if len(parts) == 2 else (None, None)


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str
) -> list[tuple[int, int]] | None:
    """Character spans inside ``{% generation %}`` blocks; None for a template without them."""
    template: str = tokenizer.get_chat_template()
    if not _MARKER.search(template):
        return None
    tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
    result: Any = render_jinja_template(  # (texts, spans per text), annotated as str
        conversations=[[dict(message) for message in messages]],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokens,
    )
    rendered, spans = result
    assert rendered[0] == text, "the template renders differently with markers tracked"
    return [(int(start), int(stop)) for start, stop in spans[0]]


def _mark(mask_S: NDArray[np.bool_], offsets_S2: NDArray[np.int64], start: int, stop: int) -> None:
    """Mark the run of tokens from the first to the last that overlap [start, stop)."""
    inside = np.flatnonzero(_overlap(offsets_S2, start, stop))
    if inside.size:  # a run, so that zero-width offsets (trimmed white space) inside it are not lost
        mask_S[inside[0] : inside[-1] + 1] = True


def _overlap(offsets_S2: NDArray[np.int64], start: int, stop: int) -> NDArray[np.bool_]:
    return (offsets_S2[:, 0] < stop) & (offsets_S2[:, 1] > start) & (offsets_S2[:, 0] < offsets_S2[:, 1])


def _mark_end_of_turn(
    mask_S: NDArray[np.bool_],
    ids: list[int],
    offsets_S2: NDArray[np.int64],
    answer: _Answer,
    text: str,
    special: frozenset[int],
    eos: int | None,
) -> None:
    first = int(np.searchsorted(offsets_S2[:, 0], answer.stop))
    for j in range(first, len(ids)):
        start, stop = offsets_S2[j]
        if ids[j] in special:
            if stop <= answer.turn_stop or ids[j] == eos:
                mask_S[first : j + 1] = True
            return
        if text[start:stop].strip():
            return


@lru_cache(maxsize=8)
def _special_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    """Ids that text pieces never merge into. ``size`` renews the answer when tokens were added."""
    return frozenset(tokenizer.added_tokens_decoder) | frozenset(tokenizer.all_special_ids)


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.name_or_path or type(tokenizer).__name__
