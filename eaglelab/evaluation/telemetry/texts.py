"""Texts beside the token ids of records, so that they can be read without the target's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eaglelab.decoding import GenerationResult
from eaglelab.evaluation.stream import TextDecoder

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Token id -> its text inside a sentence, each looked up once.

    A token that is no whole characters has the tokenizer's own name for it; an id outside the vocabulary its number.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._before = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._skip = len(self._decode(self._before))

    def __call__(self, tokens: Sequence[int]) -> list[str]:
        return [self._of(token) for token in tokens]

    def _of(self, token: int) -> str:
        if token not in self._known:
            text = self._decode([*self._before, token])[self._skip :]  # alone, some tokenizers drop a leading space
            if not text or _BROKEN in text:
                text = self.tokenizer.convert_ids_to_tokens(token)
            self._known[token] = str(token) if text is None else text
        return self._known[token]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def told_records(result: GenerationResult, texts: TokenTexts | None, prompt: str) -> Iterator[dict[str, Any]]:
    """The records of an answer's rounds, with texts where there is a tokenizer.

    prompt: the question, which goes into the first record.
    """
    if texts is None:
        for record in result.rounds:
            yield record.to_dict()
        return
    answer = TextDecoder(texts.tokenizer)
    answer.push(result.tokens[0], accepted=False)
    for number, record in enumerate(result.rounds):
        told = record.to_dict()
        pieces = [answer.push(token, accepted=False) for token in record.published_tokens]
        rest = answer.flush() if record.stop_reason is not None else None
        told["published_text"] = [piece.text if piece else "" for piece in pieces]
        if rest is not None:
            told["published_text"][-1] += rest.text
        if record.nodes is not None:
            told["root_text"] = texts([told["root_token"]])[0]
            told["node_text"] = texts(told["node_token"])
            told["dropped_text"] = texts(told["dropped_token"])
        told["prompt"] = prompt if number == 0 else None
        yield told
