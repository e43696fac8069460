"""Streaming text with the accepted draft tokens marked.

A token need not be whole characters (byte-level tokens split UTF-8) nor decode the same alone and
in context, so text is cut only where it has settled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from eaglelab.decoding import Engine, RoundRecord, Sampling

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_GREEN_UNDERLINED, _RESET = "\x1b[4;32m", "\x1b[0m"
COLORS = ("auto", "always", "never")


class Decodes(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True)
class Piece:
    """Text that one or more tokens completed.

    accepted: all of those tokens were drafted and accepted; False for tokens of the target's own.
    """

    text: str
    accepted: bool


class TextDecoder:
    """Token ids -> text, incrementally; the pieces joined are the decoded whole."""

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # settled tokens kept for context, then unsettled ones
        self._settled = 0
        self._accepted: list[bool] = []  # one per unsettled token

    def push(self, token: int, *, accepted: bool) -> Piece | None:
        """The text that this token completes, or None while characters are unfinished."""
        self._ids.append(token)
        self._accepted.append(accepted)
        text = self._new_text()
        return None if not text or text.endswith(_UNFINISHED) else self._settle(text)

    def flush(self) -> Piece | None:
        """What is left at the end; broken bytes come out as replacement characters."""
        text = self._new_text()
        return self._settle(text) if text else None

    def _new_text(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._settled])) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _settle(self, text: str) -> Piece:
        piece = Piece(text, all(self._accepted))
        self._ids = self._ids[self._settled :]
        self._settled, self._accepted = len(self._ids), []
        return piece


@dataclass
class Stream:
    """Iterate over the pieces of one generation; `rounds` fills as they come.

    Raises (when iterated):
        ValueError: see `Engine.start`.
    """

    engine: Engine
    tokenizer: Decodes
    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int] | None = None
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.rounds: list[RoundRecord] = []

    def __iter__(self) -> Iterator[Piece]:
        self.tokens, self.rounds = [], []
        decoder = TextDecoder(self.tokenizer)
        state = self.engine.start(
            [self.prompt_ids], max_new_tokens=self.max_new_tokens, stop_ids=self.stop_ids, sampling=self.sampling
        )
        (request,) = state.requests
        try:
            yield from self._push(decoder, request.new_tokens, accepted=0)
            for (record,) in self.engine.rounds(state):
                self.rounds.append(record)
                fresh = request.new_tokens[-record.published :]
                yield from self._push(decoder, fresh, accepted=record.accepted)
        finally:
            self.engine.release(state)
        rest = decoder.flush()
        if rest is not None:
            yield rest

    def _push(self, decoder: TextDecoder, tokens: list[int], accepted: int) -> Iterator[Piece]:
        self.tokens += tokens
        for place, token in enumerate(tokens):
            piece = decoder.push(token, accepted=place < accepted)
            if piece is not None:
                yield piece


def mark(pieces: Iterable[Piece], *, color: bool) -> Iterator[str]:
    """Text with accepted pieces in green and underlined, or, without colour, in [brackets].

    Neighbouring accepted pieces share one pair of marks. Colour is closed around line breaks, and
    at the end even when reading the pieces fails.
    """
    opening, closing = (_GREEN_UNDERLINED, _RESET) if color else ("[", "]")
    inside = False
    try:
        for piece in pieces:
            if piece.accepted != inside:
                inside = piece.accepted
                yield opening if inside else closing
            if inside and color:
                yield piece.text.replace("\n", f"{closing}\n{opening}")
            else:
                yield piece.text
    except GeneratorExit:
        inside = False  # nobody is reading any more
        raise
    finally:
        if inside:
            yield closing


def wants_color(color: str, out: TextIO = sys.stdout) -> bool:
    """Resolve `color=auto|always|never`; auto means: on a terminal.

    Raises:
        ValueError: any other value.
    """
    if color not in COLORS:
        raise ValueError(f"color={color!r}: choose one of {', '.join(COLORS)}")
    return color == "always" or (color == "auto" and out.isatty())
