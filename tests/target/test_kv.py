"""KV slots against a naive list of committed rows per sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eaglelab.target import KVSlots

HEADS, WIDTH, LAYERS = 2, 3, 2


def rows_of(batch: int, rows: int, start: int) -> Tensor:
    """Distinct numbers, so that any mix-up shows, [B, H, N, hd]."""
    count = batch * HEADS * rows * WIDTH
    return torch.arange(start, start + count, dtype=torch.float32).view(batch, HEADS, rows, WIDTH)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int], list[list[int]] | None]]]:
    batch = draw(st.integers(1, 3))
    plan = []
    for _ in range(draw(st.integers(1, 5))):
        rows = draw(st.integers(1, 5))
        ragged = draw(st.booleans())
        counts = [draw(st.integers(0, rows)) if ragged else rows for _ in range(batch)]
        accepted: list[list[int]] | None = None
        if draw(st.booleans()):
            accepted = [draw(st.lists(st.integers(0, c - 1), unique=True)) if c else [] for c in counts]
            accepted = [sorted(line) for line in accepted]
        plan.append((rows, counts, accepted))
    return batch, plan


@settings(deadline=None, max_examples=60)
@given(rounds(), st.booleans())
def test_slots_hold_exactly_the_committed_rows(case, pooled: bool) -> None:
    batch, plan = case
    shapes = [(HEADS, WIDTH, HEADS, WIDTH)] * LAYERS if pooled else None
    cache = KVSlots(batch, capacity=25, layer_shapes=shapes)
    naive: list[list[Tensor]] = [[] for _ in range(batch)]
    for turn, (rows, counts, accepted) in enumerate(plan):
        cache.begin(rows, counts, "cpu")
        for layer in range(LAYERS):
            new = rows_of(batch, rows, 1000 * turn + 1) + 10000 * layer
            keys, values = cache.update(new, -new, layer)
            for b in range(batch):
                seen = len(naive[b])
                assert torch.equal(keys[b, :, seen : seen + counts[b]], new[b, :, : counts[b]])
                if naive[b]:
                    assert torch.equal(values[b, :, :seen], -torch.stack(naive[b], 1) - 10000 * layer)
        if accepted is None:
            cache.discard()
            continue
        first = rows_of(batch, rows, 1000 * turn + 1)
        for b, line in enumerate(accepted):
            naive[b] += [first[b, :, r] for r in line]
        width = max(len(line) for line in accepted)
        table = torch.tensor([line + [0] * (width - len(line)) for line in accepted]).long()
        cache.commit(table.view(batch, width), [len(line) for line in accepted])
        assert cache.lengths == [len(line) for line in naive]
    for b, line in enumerate(naive):
        for layer in range(LAYERS if line else 0):
            keys, values = cache.slots(layer)
            assert torch.equal(keys[b, :, : len(line)], torch.stack(line, 1) + 10000 * layer)
            assert torch.equal(values[b, :, : len(line)], -torch.stack(line, 1) - 10000 * layer)


def test_leading_rows_are_committed_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVSlots(1, 8)
    cache.begin(4, None, "cpu")
    cache.update(rows_of(1, 4, 0), rows_of(1, 4, 0), 0)
    monkeypatch.setattr(torch.Tensor, "index_select", None)  # any gather would fail
    cache.commit(torch.tensor([[0, 1, 2]]), [3])
    assert cache.lengths == [3]


def test_the_buffer_is_never_reallocated() -> None:
    cache = KVSlots(1, 8)
    addresses = set()
    for _ in range(4):
        cache.begin(2, None, "cpu")
        keys, _ = cache.update(rows_of(1, 2, 0), rows_of(1, 2, 0), 0)
        addresses.add(keys.data_ptr())
        cache.commit(None, [2])
    assert len(addresses) == 1


def test_hidden_slots_are_zero_not_garbage() -> None:
    cache = KVSlots(2, 5)
    cache.begin(3, [3, 1], "cpu")
    keys, _ = cache.update(rows_of(2, 3, 1), rows_of(2, 3, 1), 0)
    assert bool((keys[1, :, 1:] == 0).all())


@pytest.mark.parametrize(
    ("rows", "counts", "says"),
    [
        (None, [4], "do not fit the rows"),
        (None, [1, 1], "do not fit the rows"),
        (torch.tensor([[3]]), [1], "indices below"),
        (torch.tensor([[-1]]), [1], "indices below"),
        (torch.tensor([[0]]), [2], "expected"),
        ([[0]], [2], "indices below"),
    ],
)
def test_wrong_commits_are_refused(rows, counts: list[int], says: str) -> None:
    cache = KVSlots(1, 8)
    cache.begin(3, None, "cpu")
    cache.update(rows_of(1, 3, 0), rows_of(1, 3, 0), 0)
    with pytest.raises(ValueError, match=says):
        cache.commit(rows, counts)
    assert cache.lengths == [0]


def test_misuse_is_caught() -> None:
    with pytest.raises(ValueError, match="capacity >= 1"):
        KVSlots(1, 0)
    cache = KVSlots(2, 8)
    with pytest.raises(AssertionError, match="begin"):
        cache.update(rows_of(2, 1, 0), rows_of(2, 1, 0), 0)
    cache.begin(1, None, "cpu")
    with pytest.raises(AssertionError, match="commit"):
        cache.begin(1, None, "cpu")
    cache.reset()
    with pytest.raises(ValueError, match="sequence 1 holds 0 tokens and 9 more"):
        cache.begin(9, [3, 9], "cpu")
