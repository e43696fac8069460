"""Writing records while decoding: JSON Lines or Parquet."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eaglelab.evaluation.telemetry.fields import FIELDS, Record


class Sink(ABC):
    """Takes records until it is closed; a context manager."""

    @abstractmethod
    def write(self, record: Record) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Finish the file. Closing twice is harmless."""

    def abandon(self) -> None:
        """Called instead of `close` when an exception ends the `with` block."""
        self.close()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def open_sink(path: str | Path, *, group: int = 1024) -> Sink:
    """A sink for `path.jsonl` or `path.parquet`; replaces an older file.

    JSON Lines: every record is on its way to the disk when `write` returns, and a killed run leaves all of them.
    Parquet: small and typed; row groups of `group` records go to `path.parquet.partial`, which takes its final name
    when it is closed. After an exception it keeps the partial name and can be read; a killed process leaves nothing
    that Parquet readers take.

    Raises:
        ValueError: another suffix; from `write` and `close` (Parquet): a value that does not fit its
            column; its group of records is lost then.
    """
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: records are written as .jsonl or .parquet; choose one of the two")
    path.parent.mkdir(parents=True, exist_ok=True)
    return JsonlSink(path) if path.suffix == ".jsonl" else ParquetSink(path, group)


class JsonlSink(Sink):
    """One JSON object per line, flushed line by line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(dict(record)) + "\n")

    def close(self) -> None:
        self._file.close()


class ParquetSink(Sink):
    """Row groups of one schema: `FIELDS`, then whatever else the first group of records holds."""

    def __init__(self, path: Path, group: int = 1024) -> None:
        self._path, self._partial = path, partial_name(path)
        self._group = group
        self._waiting: list[Record] = []
        self._writer: Any = None
        self._closed = False
        self._partial.unlink(missing_ok=True)

    def write(self, record: Record) -> None:
        assert not self._closed, "the sink is closed"
        if self._writer is not None:
            new = [name for name in record if name not in self._writer.schema.names]
            if new:
                raise ValueError(
                    f"{self._path}: field {new[0]!r} comes too late, after the columns were fixed: give every record "
                    "the same fields (None where there is no value), or write .jsonl"
                )
        self._waiting.append(record)
        if len(self._waiting) >= self._group:
            self._flush()

    def close(self) -> None:
        if not self._closed:
            self._finish()
            os.replace(self._partial, self._path)

    def abandon(self) -> None:
        if not self._closed:
            self._finish()

    def _finish(self) -> None:
        self._closed = True
        try:
            if self._waiting or self._writer is None:
                self._flush()
        finally:
            if self._writer is not None:
                self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        records, self._waiting = self._waiting, []
        schema = _schema(records) if self._writer is None else self._writer.schema
        columns = []
        for column in schema:
            try:
                columns.append(pa.array([record.get(column.name) for record in records], column.type))
            except (pa.ArrowException, TypeError, OverflowError) as error:
                raise ValueError(f"{self._path}: field {column.name!r} is to hold {column.type}: {error}") from error
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial, schema, compression="zstd")
        self._writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _schema(records: Sequence[Record]) -> Any:
    import pyarrow as pa

    kinds: dict[Any, Any] = {
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
        list[int]: pa.list_(pa.int64()),
        list[float]: pa.list_(pa.float64()),
        list[bool]: pa.list_(pa.bool_()),
        list[str]: pa.list_(pa.string()),
    }
    schema = pa.schema([(name, kinds[kind]) for name, kind in FIELDS.items()])
    others = list(dict.fromkeys(name for record in records for name in record if name not in FIELDS))
    for name in others:
        try:
            kind = pa.infer_type([record.get(name) for record in records])
        except pa.ArrowException as error:
            raise ValueError(f"field {name!r} is no Parquet column: {error}; write .jsonl") from error
        schema = schema.append(pa.field(name, kind))
    return schema


def partial_name(path: Path) -> Path:
    """Where a Parquet file grows before it is finished."""
    return path.with_name(f"{path.name}.partial")
