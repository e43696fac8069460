"""What a store keeps of every token, and the order in which its rows are cut into shards.

Letters: B sequences, S tokens, T tokens of several rows, d width, w width of a teacher row, N rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from eaglelab.features.encoding import encoding
from eaglelab.features.source import Features, Head
from eaglelab.features.top_k import encode_top_k, teacher_rows, top_k_bytes_per_token, top_k_head
from eaglelab.target import FINAL, FrozenTarget, Tap

Teacher = Literal["feature", "top_k"]


@dataclasses.dataclass(frozen=True)
class Contents:
    """The stored tensors of a token.

    Attributes:
        streams: stored feature addresses.
        dtype: name of their :mod:`~eaglelab.features.encoding`.
        width: d of the target.
        vocab_size: V of the target.
        teacher: ``feature``: the stream ``final`` is kept and read by the target's head; ``top_k``: the distribution is
            kept instead, as its most probable tokens.
        top_k: how many; None with ``feature``.
    """

    streams: tuple[Tap, ...]
    dtype: str
    width: int
    vocab_size: int
    teacher: Teacher = "feature"
    top_k: int | None = None

    @classmethod
    def of(cls, target: FrozenTarget, taps: Sequence[Tap], dtype: str, teacher: str, top_k: int) -> Contents:
        """What a variant that reads ``taps`` needs, and nothing else.

        Raises:
            ValueError: unknown ``dtype`` or ``teacher``, a ``top_k`` out of range, or a variant that cannot do without
                the last feature.
        """
        encoding(dtype)
        if teacher not in get_args(Teacher):
            raise ValueError(f"teacher={teacher!r} is not one of {', '.join(get_args(Teacher))}")
        if teacher == "feature":
            return cls(tuple(dict.fromkeys((*taps, FINAL))), dtype, target.hidden_size, target.vocab_size)
        if FINAL in taps:
            raise ValueError(
                "teacher=top_k leaves out the last feature, which this variant reads and regresses; use "
                "teacher=feature, which dtype=int8 or dtype=int4 make smaller, or variant=eagle3"
            )
        if not 1 <= top_k < target.vocab_size:
            raise ValueError(
                f"top_k={top_k} must be from 1 to {target.vocab_size - 1}, the target's vocabulary less one"
            )
        return cls(tuple(taps), dtype, target.hidden_size, target.vocab_size, "top_k", top_k)

    @property
    def bytes_per_token(self) -> int:
        """Stored features of one token."""
        size = len(self.streams) * encoding(self.dtype).bytes_per_token(self.width)
        return size + (top_k_bytes_per_token(self.vocab_size, self.top_k) if self.top_k else 0)

    def needed(self, taps: Sequence[Tap]) -> tuple[Tap, ...] | None:
        """The streams that a variant reading ``taps`` needs from this store; None if one is not here."""
        wanted = tuple(dict.fromkeys((*taps, FINAL))) if self.teacher == "feature" else tuple(taps)
        return wanted if set(wanted) <= set(self.streams) else None

    def encode(self, streams: Mapping[Tap, Tensor], head: Head) -> dict[str, Tensor]:
        """Features of T tokens, [T, d] by tap, ``final`` among them -> the tensors to store."""
        parts: dict[str, Tensor] = {}
        for tap in self.streams:
            parts |= _prefixed(str(tap), encoding(self.dtype).encode(streams[tap]))
        if self.top_k:
            parts |= _prefixed("teacher", encode_top_k(streams[FINAL], head, self.top_k))
        return parts

    def decode(self, parts: Mapping[str, Tensor], taps: Sequence[Tap], head: Head, dtype: torch.dtype) -> Features:
        """Stored tensors -> the features of ``taps`` in ``dtype``, and teacher rows with what reads them."""
        wanted = self.needed(taps)
        assert wanted is not None, "checked when the store was opened"
        streams: dict[Tap, Tensor] = {
            tap: encoding(self.dtype).decode(self.parts_of(str(tap), parts), self.width).to(dtype) for tap in wanted
        }
        if self.teacher == "feature":
            return Features(streams, streams[FINAL], head)
        return Features(streams, teacher_rows(self.parts_of("teacher", parts)), top_k_head(self.vocab_size))

    def names(self, streams: Sequence[Tap]) -> list[str]:
        """The stored tensors that hold these streams and the teacher."""
        token = {tap: torch.zeros(1, self.width) for tap in (*self.streams, FINAL)}
        wanted = {str(tap) for tap in streams} | {"teacher"}
        head = lambda x: torch.zeros(1, self.vocab_size)  # noqa: E731
        return [name for name in self.encode(token, head) if name.split(".")[0] in wanted]

    @staticmethod
    def parts_of(name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The stored tensors of one stream or of the teacher, by suffix."""
        found = {key: part for key, part in parts.items() if key.split(".")[0] == name}
        return {key.removeprefix(name).removeprefix("."): part for key, part in found.items()}

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self) | {"streams": list(self.streams)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Contents:
        return cls(**{**values, "streams": tuple(values["streams"])})  # type: ignore[arg-type]

    def __str__(self) -> str:
        streams = ", ".join(str(tap) for tap in self.streams)
        teacher = "" if self.teacher == "feature" else f" + top-{self.top_k} distribution"
        return f"streams {streams} in {self.dtype}{teacher}, {self.bytes_per_token:,} bytes/token"


def shard_stops(tokens_N: Sequence[int], bytes_per_token: int, shard_bytes: int) -> list[int]:
    """Cut rows, in order, into shards of about ``shard_bytes``: the end of each in N. A row is never cut."""
    stops: list[int] = []
    filled = 0
    for row, tokens in enumerate(tokens_N):
        size = tokens * bytes_per_token
        if filled and filled + size > shard_bytes:
            stops.append(row)
            filled = 0
        filled += size
    return [*stops, len(tokens_N)] if len(tokens_N) else stops


def _prefixed(name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{suffix}" if suffix else name: part for suffix, part in parts.items()}
