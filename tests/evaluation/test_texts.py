"""Texts of tokens beside records: those of the whole answer, piece by piece."""

import pytest
import torch

from eaglelab.decoding import Engine, StaticTree
from eaglelab.evaluation.telemetry import open_sink, read_records
from eaglelab.evaluation.telemetry.texts import TokenTexts, told_records
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import ScriptDrafter, drafts, tiny_llama
from tests.target.target_tokenizer import tiny_tokenizer

EURO = ("â", "Ĥ", "¬")  # the three bytes of one character, as byte-level tokenizers write them


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(extra=EURO)


def test_token_texts(tokenizer):
    texts = TokenTexts(tokenizer)
    he, space = tokenizer.convert_tokens_to_ids(["he", "Ġ"])
    broken = tokenizer.convert_tokens_to_ids("Ĥ")
    assert texts([he, space, 2, broken, 10_000]) == ["he", " ", "</s>", "Ĥ", "10000"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_records_tell_the_answer(tokenizer, tmp_path, suffix):
    vocabulary = len(tokenizer)
    target = FrozenTarget(tiny_llama(vocabulary, positions=96))
    drafter = ScriptDrafter(drafts("noisy", target.model, vocabulary), 7)
    engine = Engine(target, drafter, StaticTree(), record_nodes=True)
    (result,) = engine.generate([[7, 3]], max_new_tokens=24, stop_ids=set())
    bytes_ = tokenizer.convert_tokens_to_ids(list(EURO))
    euro = [*bytes_, 5, bytes_[0]]  # the last character stays unfinished
    tokens = (euro * 6)[: len(result.tokens) - 1]
    for record in result.rounds:  # an answer with characters that rounds cut
        record.published_tokens[:], tokens = tokens[: record.published], tokens[record.published :]
    with open_sink(tmp_path / f"rounds.{suffix}") as sink:
        for record in told_records(result, TokenTexts(tokenizer), "a question"):
            sink.write(record)
    records = list(read_records(tmp_path / f"rounds.{suffix}"))
    assert [record["prompt"] for record in records] == ["a question"] + [None] * (len(records) - 1)
    ids = [result.tokens[0], *(token for record in result.rounds for token in record.published_tokens)]
    pieces = [piece for record in records for piece in record["published_text"]]
    assert len(pieces) == len(ids) - 1
    first = tokenizer.decode(ids[:1], skip_special_tokens=True)
    assert "\N{EURO SIGN}c" in "".join(pieces)
    assert first + "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    for record in records:
        assert record["node_text"] == [TokenTexts(tokenizer)([token])[0] for token in record["node_token"]]
        assert record["root_text"] == TokenTexts(tokenizer)([record["root_token"]])[0]


def test_without_a_tokenizer_records_have_ids_alone():
    target = FrozenTarget(tiny_llama(23, positions=96))
    drafter = ScriptDrafter(drafts("perfect", target.model, 23), 7)
    engine = Engine(target, drafter, StaticTree(), record_nodes=True)
    (result,) = engine.generate([[7, 3]], max_new_tokens=6, stop_ids=set())
    for record in told_records(result, None, "a question"):
        assert "node_text" not in record
        assert torch.tensor(record["node_token"]).max() < 23
