"""Run the target once over packed rows and keep what it says.

Letters: B sequences, S tokens, T tokens of a shard, d hidden width, N rows.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from eaglelab.data import ConversationDataModule, PackedRow, PackedRows, collate
from eaglelab.features import files
from eaglelab.features.contents import Contents, shard_stops
from eaglelab.features.manifest import feature_manifest
from eaglelab.features.plan import (
    DIGEST,
    FORMAT,
    INDEX,
    MANIFEST,
    PLAN,
    Plan,
    Shard,
    Split,
    pack_rows,
    require_same_plan,
    rows_file,
)
from eaglelab.target import FINAL, FrozenTarget, Tap

log = logging.getLogger(__name__)

AGAIN = "run the same command again: it continues where it stopped"


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a call of :meth:`StoreWriter.write` did.

    Attributes:
        shards: of the store.
        written, found: shards that this call wrote, and that were there already, of this process's share.
        tokens: tokens that were run through the target.
        seconds: that it took, writing included.
        complete: whether the store is finished; false while other processes still write.
    """

    shards: int
    written: int
    found: int
    tokens: int
    seconds: float
    complete: bool


class StoreWriter:
    """Writes a feature store, or continues one.

    The bytes of a store depend on target, data and settings alone: every shard starts with batches of its own. So an
    interrupted store ends up as an uninterrupted one, and any number of processes write the same one.

    Args:
        target: the frozen target.
        data: prepared conversations.
        settings: :data:`~eaglelab.features.plan.ROW_SETTINGS` of ``data``.
        taps: streams that the variant reads.
        contents: what to keep.
        out: the folder.
        shard_bytes: about the size of a shard, which is what a kill can lose.
        batch_tokens: token slots of a forward pass of the target.
        rank: this process of
        world_size: processes that share the shards.
    """

    def __init__(
        self,
        target: FrozenTarget,
        data: ConversationDataModule,
        settings: dict[str, Any],
        taps: Sequence[Tap],
        contents: Contents,
        out: str | Path,
        *,
        shard_bytes: int = 2**26,
        batch_tokens: int = 4096,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.target, self.out = target, Path(out)
        self.rank, self.world_size = rank, world_size
        self.manifest = feature_manifest(target, taps)
        both = {"train": data.train_rows, "val": data.val_rows}
        self.rows: dict[str, PackedRows] = {name: rows for name, rows in both.items() if rows is not None}
        stops = {
            name: shard_stops(row_tokens(rows).tolist(), contents.bytes_per_token, shard_bytes)
            for name, rows in self.rows.items()
        }
        splits = {name: Split(rows.digest, tuple(stops[name])) for name, rows in self.rows.items()}
        self.plan = Plan(contents, splits, settings, data.report, shard_bytes, batch_tokens, 0.0)
        self.plan = dataclasses.replace(self.plan, padding_share=self._padding_share())

    @property
    def tokens(self) -> int:
        """Tokens of the store."""
        return sum(len(rows.tokens_T) for rows in self.rows.values())

    @property
    def bytes(self) -> int:
        """Size of the store, headers apart."""
        return self.tokens * (self.plan.contents.bytes_per_token + 5)

    def write(self, *, show_progress: bool | None = None) -> Progress:
        """Write this process's shards, and the index once every shard of every process is there.

        Args:
            show_progress: None: if the output is a terminal and this is the first process.

        Raises:
            ValueError: ``out`` holds another store or something else, another process writes there, or the disk is
                full or may not be written to. Finished shards stay; nothing half-written does.
        """
        with files.plain_errors(self.out, AGAIN):
            self._require_store_or_nothing()
            self.out.mkdir(parents=True, exist_ok=True)
            with files.sole_writer(self.out, alone=self.world_size == 1):
                require_same_plan(self.out, self.plan, self.manifest)
                return self._write(show_progress)

    def _write(self, show_progress: bool | None) -> Progress:
        shards = self.plan.shards()
        mine = shards[self.rank :: self.world_size]
        own = {shard.file for shard in mine} | {f"{shard.file}{DIGEST}" for shard in mine}
        files.remove_unfinished(self.out, own if self.world_size > 1 else None)
        found = [shard for shard in mine if self._is_whole(shard)]
        todo = [shard for shard in mine if shard not in found]
        self._require_space(todo)
        if self.rank == 0:
            self._write_plan()
        tokens, began = 0, time.perf_counter()
        hidden = {None: self.rank > 0 or None, True: False, False: True}[show_progress]
        total, done = (sum(self._tokens(shard) for shard in some) for some in (mine, found))
        with tqdm(total=total, initial=done, desc="cache", unit="tok", unit_scale=True, disable=hidden) as bar:
            for shard in todo:
                content = save(self._compute(shard, bar))
                files.put(self.out / shard.file, content)
                digest = files.digest(content)
                files.put(self.out / f"{shard.file}{DIGEST}", f"{digest}  {shard.file}\n".encode())
                tokens += self._tokens(shard)
        seconds = time.perf_counter() - began
        return Progress(len(shards), len(todo), len(found), tokens, seconds, self._finish())

    def _require_store_or_nothing(self) -> None:
        if self.out.is_dir() and not (self.out / PLAN).is_file():
            foreign = [path.name for path in self.out.iterdir() if not self._is_ours(path.name)]
            if foreign:
                raise ValueError(f"out={self.out} holds {sorted(foreign)[0]}, no feature store; choose another folder")
        elif self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out={self.out} is a file; choose a folder")

    def _is_ours(self, name: str) -> bool:
        shards = {shard.file for shard in self.plan.shards()}
        ours = {MANIFEST, *map(rows_file, self.rows)} | shards | {f"{name}{DIGEST}" for name in shards}
        return name in ours or name.endswith(files.UNFINISHED)

    def _require_space(self, todo: Sequence[Shard]) -> None:
        """Tell before the work that its result will not fit."""
        needed = sum(self._tokens(shard) for shard in todo) * self.plan.contents.bytes_per_token
        free = files.free_bytes(self.out)
        if needed > free:
            raise ValueError(
                f"out={self.out} needs {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free; free some space, "
                "choose another folder, or keep less per token (dtype=int8, dtype=int4, teacher=top_k)"
            )

    def _write_plan(self) -> None:
        """The small files, ``store.json`` last: it tells that the folder is a store."""
        whole = {rows_file(name): pack_rows(rows) for name, rows in self.rows.items()}
        for name, content in (whole | {PLAN: self.plan.to_json().encode()}).items():
            path = self.out / name
            if name == PLAN and not (self.out / MANIFEST).is_file():
                files.put(self.out / MANIFEST, self.manifest.to_json().encode())
            if not path.is_file() or path.read_bytes() != content:
                files.put(path, content)

    def _is_whole(self, shard: Shard) -> bool:
        """Whether a shard is there and as its digest says; a damaged one is written again."""
        path = self.out / shard.file
        note = self.out / f"{shard.file}{DIGEST}"
        if not (path.is_file() and note.is_file()):
            return False
        whole = read_digest(note) == files.digest_of(path)
        if not whole:
            log.warning("%s is damaged and is written again", path)
        return whole

    def _tokens(self, shard: Shard) -> int:
        return int(row_tokens(self.rows[shard.split])[shard.start : shard.stop].sum())

    def _padding_share(self) -> float:
        """Padding of all token slots of the forward passes."""
        slots = 0
        for shard in self.plan.shards():
            lengths = row_tokens(self.rows[shard.split])[shard.start : shard.stop]
            slots += sum(len(batch) * max(lengths[i] for i in batch) for batch in self._batches(lengths.tolist()))
        return round(float(1 - self.tokens / slots), 6)

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Rows of similar length together, in passes of about ``batch_tokens`` slots."""
        batch: list[int] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if batch and (len(batch) + 1) * lengths[batch[0]] > self.plan.batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _compute(self, shard: Shard, bar: Any) -> dict[str, Tensor]:
        """The stored tensors of a shard, [T, n] each."""
        rows = [self.rows[shard.split][i] for i in range(shard.start, shard.stop)]
        stops = np.cumsum([len(row.tokens_S) for row in rows])
        whole: dict[str, Tensor] = {}
        for batch in self._batches([len(row.tokens_S) for row in rows]):
            parts = encoded_rows(self.target, [rows[i] for i in batch], self.plan.contents)
            for i, row_parts in zip(batch, parts):
                for name, part in row_parts.items():
                    if name not in whole:
                        whole[name] = torch.empty((int(stops[-1]), part.shape[-1]), dtype=part.dtype)
                    whole[name][stops[i] - len(part) : stops[i]] = part
                bar.update(len(rows[i].tokens_S))
        return whole

    def _finish(self) -> bool:
        """Write the index if every shard is there; true if so."""
        shards = [shard.file for shard in self.plan.shards()]
        if not all((self.out / f"{name}{DIGEST}").is_file() for name in shards):
            return False
        small = [MANIFEST, PLAN, *map(rows_file, self.rows)]
        digests = {name: read_digest(self.out / f"{name}{DIGEST}") for name in shards}
        digests |= {name: files.digest_of(self.out / name) for name in small}
        entries = {
            name: {"bytes": (self.out / name).stat().st_size, "xxh128": digest} for name, digest in digests.items()
        }
        content = json.dumps({"format": FORMAT, "files": entries}, indent=1, sort_keys=True) + "\n"
        path = self.out / INDEX
        if not path.is_file() or path.read_bytes() != content.encode():
            files.put(path, content.encode())
        return True


def encoded_rows(target: FrozenTarget, rows: Sequence[PackedRow], contents: Contents) -> Iterator[dict[str, Tensor]]:
    """Run the target over a batch of rows: the stored tensors of each row, [S, n], on the CPU."""
    batch = collate(rows)
    streams_BSd = target.features(
        batch.tokens_BS,
        tuple(dict.fromkeys((*contents.streams, FINAL))),
        valid_BS=batch.valid_BS,
        segment_BS=batch.segment_BS,
        position_BS=batch.position_BS,
    )
    valid_BS = batch.valid_BS.to(target.device)
    with torch.no_grad():
        parts = contents.encode({tap: stream[valid_BS] for tap, stream in streams_BSd.items()}, target.lm_head)
    parts = {name: part.cpu() for name, part in parts.items()}
    stop = 0
    for row in rows:
        start, stop = stop, stop + len(row.tokens_S)
        yield {name: part[start:stop] for name, part in parts.items()}


def row_tokens(rows: PackedRows) -> Any:
    """int64 [N], tokens of each row."""
    return np.diff(np.concatenate([[0], rows.segment_stops_G])[np.concatenate([[0], rows.row_stops_N])])


def read_digest(note: Path) -> str:
    """The digest in a file as ``xxh128sum`` writes it; empty for anything else."""
    words = note.read_text(encoding="utf-8", errors="replace").split()
    return words[0] if len(words) == 2 else ""
