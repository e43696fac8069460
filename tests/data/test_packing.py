"""Length policy, packing and collation, mostly as properties over random layouts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglelab.data import PackedRows, TokenizedChat, collate, compile_rows, pack, select
from eaglelab.data.packing import supervised_rows

RULES = ("source", "advanced", "predicted")


def make_chat(length, first_token=0, answer=None):
    mask = np.ones(length, bool) if answer is None else np.array(answer, bool)
    return TokenizedChat(np.arange(first_token, first_token + length, dtype=np.int32), mask)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=60), row_length=st.integers(40, 90))
def test_pack_uses_every_chat_once_and_fits(lengths, row_length):
    plan = pack(lengths, row_length)
    assert sorted(i for row in plan for i in row) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in row) for row in plan]
    assert all(0 < tokens <= row_length for tokens in used)
    # no two rows could have been one: at most one row is half empty
    assert sum(tokens <= row_length / 2 for tokens in used) <= 1
    assert plan == pack(list(lengths), row_length)


def test_pack_fills_rows():
    lengths = np.random.default_rng(0).integers(20, 200, 2000).tolist()
    rows = pack(lengths, 256)
    assert sum(lengths) / (256 * len(rows)) > 0.97


def test_pack_refuses_what_fits_nowhere():
    with pytest.raises(ValueError, match=r"11 tokens does not fit row_length=10; raise row_length"):
        pack([3, 11], 10)


LAYOUTS = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=12).map(lambda answer: (len(answer), answer)),
    min_size=1,
    max_size=14,
)


def rows_of(layout, row_length):
    """Chats with distinct tokens, packed."""
    chats, first = [], 1
    for length, answer in layout:
        chats.append(make_chat(length, first, answer))
        first += length
    return chats, PackedRows.build(chats, pack([length for length, _ in layout], row_length))


@settings(max_examples=100, deadline=None)
@given(layout=LAYOUTS, row_length=st.integers(12, 30), fixed=st.booleans(), rule=st.sampled_from(RULES))
def test_no_token_lost_and_segments_isolated(layout, row_length, fixed, rule):
    chats, rows = rows_of(layout, row_length)
    batch = collate(list(rows), row_length=row_length if fixed else None, supervise=rule)
    B, S = batch.tokens_BS.shape
    assert B == len(rows) == batch.batch_size
    assert (row_length if fixed else max(len(row.tokens_S) for row in rows)) == S

    found = {}
    for b in range(B):
        for segment in range(int(batch.segment_BS[b].max()) + 1):
            (at,) = (batch.segment_BS[b] == segment).nonzero(as_tuple=True)
            assert at.tolist() == list(range(at[0], at[-1] + 1)), "a segment is one run"
            assert batch.position_BS[b, at].tolist() == list(range(len(at))), "positions restart"
            tokens = batch.tokens_BS[b, at].tolist()
            found[tokens[0]] = (tokens, batch.answer_BS[b, at].tolist())
        segments = batch.segment_BS[b][batch.valid_BS[b]]
        assert (segments.diff() >= 0).all()
        assert (segments.diff() <= 1).all()
    expected = {int(c.input_ids[0]): (c.input_ids.tolist(), c.answer_mask.tolist()) for c in chats}
    assert found == expected, "every chat once, whole, with its mask"

    padding = ~batch.valid_BS
    assert (batch.segment_BS[padding] == -1).all()
    assert not batch.tokens_BS[padding].any()
    assert not batch.position_BS[padding].any()
    assert not batch.answer_BS[padding].any()
    assert int(batch.valid_BS.sum()) == sum(length for length, _ in layout)

    plan = compile_rows(batch.valid_BS, batch.segment_BS, batch.position_BS, batch.answer_BS, supervise=rule)
    assert batch.rows.source_BR.equal(plan.source_BR)
    assert batch.rows.supervised_BR.equal(plan.supervised_BR)
    assert batch.supervised == sum(supervised_rows(chat.answer_mask, rule) for chat in chats)


def test_batch_moves_as_a_copy():
    _, rows = rows_of([(3, [0, 1, 1]), (2, [0, 1])], 12)
    batch = collate(list(rows))
    moved = batch.to("meta", non_blocking=True)
    assert moved.tokens_BS.device.type == moved.rows.source_BR.device.type == "meta"
    assert batch.tokens_BS.device.type == "cpu"


@settings(max_examples=50, deadline=None)
@given(layout=LAYOUTS)
def test_rows_read_back(layout):
    _, rows = rows_of(layout, 12)
    assert sum(len(rows[i].tokens_S) for i in range(len(rows))) == len(rows.tokens_T)
    assert all(sum(row.lengths) == len(row.tokens_S) == len(row.answer_S) for row in rows)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_digest_depends_on_tokens_masks_and_boundaries():
    def digest(*chats, plan):
        return PackedRows.build(chats, plan).digest

    a, b = make_chat(3), make_chat(3, 3)
    base = digest(a, b, plan=[[0, 1]])
    assert base == digest(make_chat(3), make_chat(3, 3), plan=[[0, 1]])
    others = [
        digest(a, b, plan=[[1, 0]]),
        digest(a, b, plan=[[0], [1]]),
        digest(make_chat(6), plan=[[0]]),
        digest(make_chat(3, answer=[0, 1, 1]), b, plan=[[0, 1]]),
    ]
    assert len({base, *others}) == 5


def test_length_policy():
    chats = [make_chat(4), make_chat(9), make_chat(6, answer=[0, 0, 0, 0, 0, 1])]
    kept, dropped, truncated = select(chats, 5, "drop", "advanced")
    assert [len(c) for c in kept] == [4]
    assert (dict(dropped), truncated) == ({"too_long": 2}, 0)

    kept, dropped, truncated = select(chats, 5, "truncate", "advanced")
    assert [len(c) for c in kept] == [4, 5], "the last chat lost its answer with its end"
    assert kept[1].input_ids.tolist() == chats[1].input_ids[:5].tolist()
    assert (dict(dropped), truncated) == ({"no_supervised_row": 1}, 1)


@pytest.mark.parametrize(
    ("answer", "kept_by"),
    [
        ([1], ""),  # one token makes no row
        ([0, 0, 0], ""),
        ([1, 0, 0], "source"),
        ([0, 1], "advanced"),  # t = 0 reads it; no row has it as source or predicts it
        ([0, 0, 1], "advanced predicted"),
        ([1, 1, 1], "source advanced predicted"),
    ],
)
def test_chats_without_supervised_row_are_dropped_and_counted(answer, kept_by):
    for rule in RULES:
        kept, dropped, _ = select([make_chat(len(answer), answer=answer)], 10, "drop", rule)
        assert bool(kept) == (rule in kept_by.split()), rule
        assert dict(dropped) == ({} if kept else {"no_supervised_row": 1})


def test_bad_policies():
    with pytest.raises(ValueError, match=r"overlength='cut' is not one of drop, truncate"):
        select([], 10, "cut", "advanced")
    with pytest.raises(ValueError, match=r"max_length=1 leaves no room for a row"):
        select([], 1, "drop", "advanced")
