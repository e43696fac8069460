"""Reading records back, from finished and from partial files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaglelab.evaluation.telemetry.sinks import partial_name


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a finished or partial file, one by one.

    A last line that was cut off is left out (JSON Lines). Parquet fills the `FIELDS` that a record lacked with None.

    Raises:
        ValueError: another suffix, no such file, or (here or while reading) a file that is damaged.
    """
    path = Path(path)
    kind = path.with_suffix("").suffix if path.suffix == ".partial" else path.suffix
    if kind not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: records are read from .jsonl and .parquet; name a file of one of the two")
    if not path.is_file():
        partial = partial_name(path)
        hint = f"; an unfinished one is {partial}" if partial.is_file() else ""
        raise ValueError(f"{path}: no such file{hint}")
    return _read_jsonl(path) if kind == ".jsonl" else _read_parquet(path)


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}, line {number}: no JSON record ({error}); remove the line") from error
            yield record


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path}: no readable Parquet file ({error}). Its process was killed before the end of the file was "
            "written; write .jsonl where that may happen"
        ) from error
    with file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()
