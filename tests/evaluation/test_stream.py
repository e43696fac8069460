"""Streamed text: complete, marked, and cut only between characters."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglelab.decoding import Chain, Engine
from eaglelab.evaluation import Piece, Stream, mark, wants_color
from eaglelab.evaluation.stream import TextDecoder
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import ScriptDrafter, drafts, hf_greedy, tiny_llama


class Bytes:
    """Token = byte, decoded as UTF-8; 0 is special."""

    def decode(self, ids, *, skip_special_tokens=False):
        return bytes(i for i in ids if i).decode("utf-8", errors="replace")


class Words:
    """Like SentencePiece: a word's leading space shows only after another word."""

    def decode(self, ids, *, skip_special_tokens=False):
        return " ".join(f"w{i}" for i in ids)


def pieces_of(tokenizer, ids, accepted=None):
    decoder = TextDecoder(tokenizer)
    flags = accepted or [False] * len(ids)
    pieces = [decoder.push(i, accepted=flag) for i, flag in zip(ids, flags, strict=True)]
    return [piece for piece in [*pieces, decoder.flush()] if piece is not None]


@given(st.text(alphabet=st.characters(min_codepoint=1, exclude_categories=["Cs"]), max_size=20))
def test_characters_are_never_split(text):
    if "\ufffd" in text:
        text = text.replace("\ufffd", "")
    pieces = pieces_of(Bytes(), list(text.encode()))
    assert [piece.text for piece in pieces] == list(text)


def test_broken_bytes_still_come_out():
    pieces = pieces_of(Bytes(), [65, 0xE2, 0x82])
    assert "".join(piece.text for piece in pieces) == "A\N{REPLACEMENT CHARACTER}"
    pieces = pieces_of(Bytes(), [0xE2, 65, 66])
    assert "".join(piece.text for piece in pieces) == "\N{REPLACEMENT CHARACTER}AB"


def test_text_is_decoded_in_context():
    pieces = pieces_of(Words(), [1, 2, 3])
    assert [piece.text for piece in pieces] == ["w1", " w2", " w3"]


def test_special_tokens_are_silent():
    assert [piece.text for piece in pieces_of(Bytes(), [65, 0])] == ["A"]


def test_a_character_counts_as_accepted_when_all_its_tokens_are():
    euro = list("€".encode())
    assert pieces_of(Bytes(), euro, [True, True, True]) == [Piece("€", True)]
    assert pieces_of(Bytes(), euro, [False, True, True]) == [Piece("€", False)]


PIECES = [Piece("a", False), Piece("b", True), Piece("c\nd", True), Piece("e", False), Piece("f", True)]


def test_marks():
    assert "".join(mark(PIECES, color=False)) == "a[bc\nd]e[f]"
    on, off = "\x1b[4;32m", "\x1b[0m"
    expected = f"a{on}bc{off}\n{on}d{off}e{on}f{off}"
    assert "".join(mark(PIECES, color=True)) == expected


def test_marks_are_closed_when_reading_fails_or_stops():
    def failing():
        yield Piece("b", True)
        raise RuntimeError("lost")

    failed = mark(failing(), color=False)
    assert [next(failed) for _ in range(3)] == ["[", "b", "]"]
    with pytest.raises(RuntimeError, match="lost"):
        next(failed)
    half_read = mark(PIECES, color=False)
    assert [next(half_read) for _ in range(3)] == ["a", "[", "b"]
    half_read.close()


def test_color_setting():
    assert wants_color("always", io.StringIO())
    assert not wants_color("never")
    assert not wants_color("auto", io.StringIO())
    with pytest.raises(ValueError, match="color='red'.*auto, always, never"):
        wants_color("red")


def test_a_stream_is_the_generation(tmp_path):
    model = tiny_llama(128, seed=3)
    target = FrozenTarget(model)
    prompt = [65, 66, 67]
    drafter = ScriptDrafter(drafts("perfect", model, 128), prompt[0])
    stream = Stream(Engine(target, drafter, Chain(3)), Words(), prompt, 14, frozenset())
    pieces = list(stream)
    tokens = hf_greedy(model, prompt, 14)
    assert stream.tokens == tokens
    assert "".join(piece.text for piece in pieces) == Words().decode(tokens)
    # prefill token, then rounds of three accepted + one of the target's own; one is left over
    assert [p.accepted for p in pieces] == [False] + 3 * [True, True, True, False] + [False]
    assert [r.accepted for r in stream.rounds] == [3, 3, 3, 0]
