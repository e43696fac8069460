"""Chats into rows of tokens: length policy, packing, collation.

Letters: B rows of a batch, S tokens per row, T tokens of all rows, G segments of all rows, N rows.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eaglelab.data.batch import Batch
from eaglelab.data.chat import TokenizedChat
from eaglelab.data.rows import SuperviseRule, compile_rows, rule_offset

Overlength = Literal["drop", "truncate"]
TOO_LONG = "too_long"
NO_SUPERVISED_ROW = "no_supervised_row"


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """One row: the tokens of its segments one after the other.

    Attributes:
        tokens_S: int32 token ids.
        answer_S: bool, token belongs to an answer.
        lengths: tokens of each segment; they add up to S.
        features: stored features of its tokens, each [S, ...]; empty without a feature store.
    """

    tokens_S: NDArray[np.int32]
    answer_S: NDArray[np.bool_]
    lengths: tuple[int, ...]
    features: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


class PackedRows(Sequence[PackedRow]):
    """All rows of a data set in four flat arrays (5 bytes per token, nothing per token in Python).

    Attributes:
        tokens_T: int32, answer_T: bool, all rows one after the other.
        segment_stops_G: int64 end of each segment in T.
        row_stops_N: int64 end of each row in G.
    """

    def __init__(
        self,
        tokens_T: NDArray[np.int32],
        answer_T: NDArray[np.bool_],
        segment_stops_G: NDArray[np.int64],
        row_stops_N: NDArray[np.int64],
    ):
        self.tokens_T, self.answer_T = tokens_T, answer_T
        self.segment_stops_G, self.row_stops_N = segment_stops_G, row_stops_N

    @classmethod
    def build(cls, chats: Sequence[TokenizedChat], plan: Sequence[Sequence[int]]) -> PackedRows:
        """Rows of ``chats`` as laid out by ``plan``: for each row, the indices of its chats."""
        order = [i for row in plan for i in row]
        lengths = np.array([len(chats[i]) for i in order], dtype=np.int64)
        return cls(
            np.concatenate([np.empty(0, np.int32), *(chats[i].input_ids for i in order)]),
            np.concatenate([np.empty(0, np.bool_), *(chats[i].answer_mask for i in order)]),
            np.cumsum(lengths),
            np.cumsum(np.array([len(row) for row in plan], dtype=np.int64)),
        )

    def __len__(self) -> int:
        return len(self.row_stops_N)

    def __getitem__(self, index: int) -> PackedRow:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, last = (int(self.row_stops_N[index - 1]) if index else 0), int(self.row_stops_N[index])
        stops = self.segment_stops_G[first:last]
        start = int(self.segment_stops_G[first - 1]) if first else 0
        stop = int(stops[-1])
        lengths = np.diff(stops, prepend=start)
        return PackedRow(self.tokens_T[start:stop], self.answer_T[start:stop], tuple(lengths.tolist()))

    def shuffle_groups(self, seed: int, epoch: int) -> NDArray[np.int64] | None:
        """int64 [N]: groups of rows that are read one after the other, each shuffled; None: all rows are one group."""
        return None

    @property
    def order_name(self) -> str | None:
        """What :meth:`shuffle_groups` depends on beside its arguments; None without groups."""
        return None

    def follow(self, plan: Sequence[Sequence[int]], batches: Iterator[Batch]) -> Iterator[Batch]:
        """``batches``, read with the rows of ``plan``; the place to prepare for those that come."""
        return batches

    @property
    def digest(self) -> str:
        """sha256 over every token, mask and boundary: the identity of the data, for exact resume."""
        digest = hashlib.sha256()
        for array in (self.tokens_T, self.answer_T, self.segment_stops_G, self.row_stops_N):
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def select(
    chats: Sequence[TokenizedChat], max_length: int, overlength: Overlength, supervise: SuperviseRule
) -> tuple[list[TokenizedChat], Counter[str], int]:
    """Apply the length policy and drop chats that no row of a batch would learn from.

    Args:
        max_length: tokens; longer chats are dropped, or lose their end (``overlength="truncate"``).
        supervise: the row rule; a chat stays if it supervises at least one row under it.

    Returns:
        The chats kept, the count of dropped ones per reason, and how many of those kept were truncated.

    Raises:
        ValueError: unknown ``overlength``, or ``max_length`` below the two tokens that make a row.
    """
    if overlength not in get_args(Overlength):
        raise ValueError(f"overlength={overlength!r} is not one of {', '.join(get_args(Overlength))}")
    if max_length < 2:
        raise ValueError(f"max_length={max_length} leaves no room for a row; use at least 2 tokens")
    kept: list[TokenizedChat] = []
    dropped: Counter[str] = Counter()
    truncated = 0
    for chat in chats:
        too_long = len(chat) > max_length
        if too_long and overlength == "drop":
            dropped[TOO_LONG] += 1
            continue
        if too_long:
            chat = TokenizedChat(chat.input_ids[:max_length], chat.answer_mask[:max_length])
        if not supervised_rows(chat.answer_mask, supervise):
            dropped[NO_SUPERVISED_ROW] += 1
            continue
        kept.append(chat)
        truncated += too_long
    return kept, dropped, truncated


def supervised_rows(answer_S: NDArray[np.bool_], rule: SuperviseRule) -> int:
    """Supervised rows of one segment: its rows t whose token t, t+1 or t+2 (by the rule) is in an answer."""
    first = rule_offset(rule)
    last = len(answer_S) - 1 if rule == "source" else len(answer_S)
    return int(np.count_nonzero(answer_S[first:last]))


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Best-fit decreasing: put each segment, longest first, in the fullest row that still has room for it.

    Returns:
        Indices into ``lengths`` for each row, every index once; equal lengths keep their order.

    Raises:
        ValueError: a segment longer than a row.
    """
    if lengths and max(lengths) > row_length:
        raise ValueError(
            f"a conversation of {max(lengths)} tokens does not fit row_length={row_length}; raise row_length "
            "or lower max_length"
        )
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free tokens -> rows with exactly that much room
    room: list[int] = []  # the keys of open_rows, ascending
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(room, lengths[i])
        if at == len(room):
            row, free = len(rows), row_length
            rows.append([])
        else:
            free = room[at]
            row = open_rows[free].pop()
            if not open_rows[free]:
                del open_rows[free], room[at]
        rows[row].append(i)
        free -= lengths[i]
        if free:
            if free not in open_rows:
                open_rows[free] = []
                bisect.insort(room, free)
            open_rows[free].append(row)
    return rows


def collate(
    rows: Sequence[PackedRow], *, row_length: int | None = None, supervise: SuperviseRule = "advanced"
) -> Batch:
    """Pad rows on the right to ``row_length`` (to the longest if None) and compile their training plan."""
    longest = max(len(row.tokens_S) for row in rows)
    S = row_length or longest
    assert longest <= S, "a row is longer than row_length"
    shape = (len(rows), S)
    tokens_BS, position_BS = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segment_BS, answer_BS = np.full(shape, -1, np.int64), np.zeros(shape, np.bool_)
    for b, row in enumerate(rows):
        used = len(row.tokens_S)
        tokens_BS[b, :used] = row.tokens_S
        answer_BS[b, :used] = row.answer_S
        segment_BS[b, :used] = np.repeat(np.arange(len(row.lengths)), row.lengths)
        position_BS[b, :used] = np.concatenate([np.arange(length) for length in row.lengths])
    tokens, segment, position, answer = map(torch.from_numpy, (tokens_BS, segment_BS, position_BS, answer_BS))
    valid = segment >= 0
    plan = compile_rows(valid, segment, position, answer, supervise=supervise)
    features = {name: _padded([row.features[name] for row in rows], S) for name in rows[0].features}
    return Batch(tokens, valid, segment, position, answer, plan, features)


def _padded(parts: Sequence[Tensor], S: int) -> Tensor:
    """[S_b, ...] of each row -> [B, S, ...], zeros on padding."""
    whole = torch.zeros((len(parts), S, *parts[0].shape[1:]), dtype=parts[0].dtype)
    for b, part in enumerate(parts):
        whole[b, : len(part)] = part
    return whole
