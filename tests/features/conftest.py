"""A tiny target, random packed rows, and stores of them: no tokenizer, no conversations."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from eaglelab.data import DataReport, PackedRows, SplitReport, TokenizedChat
from eaglelab.features.contents import Contents
from eaglelab.features.store import FeatureStore
from eaglelab.features.writer import Progress, StoreWriter
from eaglelab.target import FrozenTarget
from tests.variants.conftest import tiny_target

TAPS = (2, 4, 5)
SETTINGS = {
    "limit": None,
    "val_limit": None,
    "val_fraction": 0.0,
    "max_length": 24,
    "overlength": "drop",
    "packing": True,
    "row_length": 24,
    "supervise": "advanced",
    "chat_template": None,
}


def packed_rows(plan, seed: int = 0, vocab: int = 61) -> PackedRows:
    """Random tokens; each segment's first three are the prompt."""
    random = np.random.default_rng(seed)
    lengths = [length for row in plan for length in row]
    chats = [
        TokenizedChat(random.integers(vocab, size=length).astype(np.int32), np.arange(length) >= 3)
        for length in lengths
    ]
    stops = np.cumsum([0, *(len(row) for row in plan)])
    return PackedRows.build(chats, [range(start, stop) for start, stop in itertools.pairwise(stops)])


@dataclasses.dataclass
class PreparedRows:
    """What the writer reads of a data module."""

    train_rows: PackedRows
    val_rows: PackedRows | None
    report: DataReport


def prepared(plan=((9, 7), (24,), (5, 12), (20,), (6,), (11, 13)), val=((8, 10), (15,))) -> PreparedRows:
    def split(rows: PackedRows) -> SplitReport:
        return SplitReport(len(rows), len(rows), {}, 0, len(rows.tokens_T), int(rows.answer_T.sum()), 0, len(rows), 0.1)

    train, held_out = packed_rows(plan), packed_rows(val, seed=1) if val else None
    return PreparedRows(train, held_out, DataReport(split(train), split(held_out) if held_out else None))


@pytest.fixture(scope="session")
def deep_target() -> FrozenTarget:
    return tiny_target(num_hidden_layers=8)


@pytest.fixture
def writer(deep_target):
    """Builds a writer; two or three rows per shard."""

    def build(out: Path, *, target=None, data=None, taps=TAPS, dtype="float32", top_k=None, **options) -> StoreWriter:
        target = target or deep_target
        contents = Contents.of(target, taps, dtype, "top_k" if top_k else "feature", top_k or 0)
        sizes = {"shard_bytes": 40 * contents.bytes_per_token, "batch_tokens": 48}
        return StoreWriter(target, data or prepared(), dict(SETTINGS), taps, contents, out, **(sizes | options))

    return build


@pytest.fixture
def store(writer, tmp_path):
    """Writes a store and opens it."""

    def make(name: str = "store", **options) -> FeatureStore:
        done: Progress = writer(tmp_path / name, **options).write(show_progress=False)
        assert done.complete
        return FeatureStore(tmp_path / name)

    return make


def contents_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
