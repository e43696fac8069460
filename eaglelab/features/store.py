"""Reading a feature store: rows with their features, every file checked before its first use."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eaglelab.data import Batch, PackedRow, PackedRows
from eaglelab.data.loader import epoch_order
from eaglelab.features import files
from eaglelab.features.folders import Streaming, folder_of, is_url
from eaglelab.features.manifest import feature_manifest
from eaglelab.features.plan import INDEX, MANIFEST, PLAN, Plan, Shard, rows_file, unpack_rows
from eaglelab.features.source import Features
from eaglelab.features.writer import row_tokens
from eaglelab.target import FEATURE_FIELDS, FeatureManifest, FrozenTarget, Tap

log = logging.getLogger(__name__)

SHUFFLED = 8
"""Shards among whose rows an epoch of a store under a URL shuffles at a time."""


class FeatureStore:
    """A finished store.

    Of a folder here, sizes of all files and the digests of the small ones are checked on opening, the digest of a shard
    on its first use in each process. Of a store under a URL the small files are fetched on opening and a shard on its
    first use, and each is checked as it comes.

    Args:
        path: the folder, or a URL that fsspec knows (``s3://bucket/store``).
        streaming: how a store under a URL is read.
        shuffle_shards: shards among whose rows an epoch shuffles at a time (:meth:`StoredRows.shuffle_groups`); None:
            all of a folder, :data:`SHUFFLED` under a URL.

    Attributes:
        path: the folder or URL.
        plan, manifest: what it holds and what that means.

    Raises:
        ValueError: no store, an unfinished one, a file that is missing, truncated or damaged, or a URL that cannot be
            read.
    """

    def __init__(
        self, path: str | Path, *, streaming: Streaming | None = None, shuffle_shards: int | None = None
    ) -> None:
        self.streaming = streaming or Streaming()
        self.path = str(path).rstrip("/") if is_url(path) else Path(path)
        self._folder = folder_of(path, self.streaming)
        if shuffle_shards is not None and (type(shuffle_shards) is not int or shuffle_shards < 1):
            raise ValueError(
                f"features.shuffle_shards={shuffle_shards} must be a number of shards, 1 or more; null is the default"
            )
        self.shuffle_shards = SHUFFLED if shuffle_shards is None and self._folder.streams else shuffle_shards
        plan = self._folder.read(PLAN)
        if plan is None:
            raise ValueError(f"{self.path} holds no feature store; give the out= of eaglelab cache")
        self._entries = self._read_index()
        self.plan = Plan.from_json(self._text(PLAN, plan), self._folder.where(PLAN))
        manifest = self._text(MANIFEST, self._folder.read(MANIFEST))
        self.manifest = FeatureManifest.from_json(manifest, self._folder.where(MANIFEST))
        self._names = self.plan.contents.names(self.plan.contents.streams)
        self._shards = {split: [s for s in self.plan.shards() if s.split == split] for split in self.plan.splits}
        self._require_room()
        self._opened: OrderedDict[str, Any] = OrderedDict()
        self._process = os.getpid()

    def _read_index(self) -> dict[str, dict[str, Any]]:
        content = self._folder.read(INDEX)
        if content is None:
            raise ValueError(f"the feature store {self.path} is unfinished; run its eaglelab cache command again")
        try:
            entries: dict[str, dict[str, Any]] = json.loads(content)["files"]
            _ = {name: int(entry["bytes"]) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            where, told = self._folder.where(INDEX), f"{type(error).__name__}: {error}"
            raise ValueError(f"{where} is damaged ({told}); {self._folder.repair}") from None
        self._folder.require_sizes(entries)
        return entries

    def _text(self, name: str, content: bytes | None) -> str:
        """A small file as text, checked.

        Raises:
            ValueError: it is missing or damaged.
        """
        entry = self._entry(name)
        if content is None or len(content) != int(entry["bytes"]) or files.digest(content) != entry.get("xxh128"):
            what = "is missing" if content is None else "is damaged (its digest is not the recorded one)"
            raise ValueError(f"{self._folder.where(name)} {what}; {self._folder.repair}")
        return content.decode("utf-8")

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._entries:
            raise ValueError(f"{self._folder.where(INDEX)} does not list {name}; {self._folder.repair}")
        return self._entries[name]

    def _require_room(self) -> None:
        """Raises ValueError where shards would be given up before their rows are read."""
        if not self._folder.streams or self.shuffle_shards is None:
            return
        sizes = [int(self._entries[s.file]["bytes"]) for s in self._shards["train"] if s.file in self._entries]
        needed = sum(sorted(sizes)[-(self.shuffle_shards + self.streaming.prefetch) :])
        if needed > self.streaming.cache_gib * 2**30:
            raise ValueError(
                f"features.cache_gib={self.streaming.cache_gib:g} holds less than the {self.shuffle_shards} shards "
                f"that are read at a time and the {self.streaming.prefetch} fetched ahead ({needed / 2**30:.3g} GiB); "
                "raise it, or lower features.shuffle_shards"
            )

    def require(self, target: FrozenTarget, taps: Sequence[Tap]) -> None:
        """Refuse the store of another target, address, type or norm; from now on read what ``taps`` need.

        Raises:
            ManifestMismatch: names the field that differs, both values and the way out.
        """
        recorded, present = self.manifest, feature_manifest(target, taps)
        needed = self.plan.contents.needed(taps)
        if needed is not None and recorded.taps != present.taps:  # the store holds more than that
            recorded = dataclasses.replace(recorded, taps=present.taps, tap_norm=present.tap_norm)
        recorded.require_same(present, FEATURE_FIELDS, f"the feature store {self.path} does not fit")
        assert needed is not None, "equal taps need the stored streams"
        self._names = self.plan.contents.names(needed)

    def rows(self, split: str) -> StoredRows | None:
        """The rows of ``train`` or ``val``; None if the store has no such split.

        Raises:
            ValueError: their file is damaged.
        """
        if split not in self.plan.splits:
            return None
        name = rows_file(split)
        with self._folder.held(name, self._entry(name)) as path:
            rows = unpack_rows(path)
        return StoredRows(self, split, rows)

    def shards(self, split: str) -> list[Shard]:
        return self._shards[split]

    def read(self, shard: Shard, start: int, stop: int) -> dict[str, Tensor]:
        """Tokens ``start`` to ``stop`` of a shard: the stored tensors, [S, n].

        Raises:
            ValueError: the shard is missing, truncated or damaged.
        """
        file = self._open(shard)
        return {name: file.get_slice(name)[start:stop] for name in self._names}

    def _open(self, shard: Shard) -> Any:
        if self._process != os.getpid():  # a forked worker: handles are not shared
            self._opened, self._process = OrderedDict(), os.getpid()
        if shard.file not in self._opened:
            with self._folder.held(shard.file, self._entry(shard.file)) as path:
                try:
                    self._opened[shard.file] = safe_open(path, framework="pt")
                except (SafetensorError, OSError) as error:
                    where = self._folder.where(shard.file)
                    raise ValueError(f"{where} cannot be read ({error}); {self._folder.repair}") from None
            if self._folder.streams and self.shuffle_shards is not None:
                while len(self._opened) > 2 * self.shuffle_shards:  # an open file keeps its place on the disk
                    self._opened.popitem(last=False)
        self._opened.move_to_end(shard.file)
        return self._opened[shard.file]

    def check_all(self) -> None:
        """Check the content of every file; those under a URL are fetched for it, one after the other.

        Raises:
            ValueError: names the first damaged one.
        """
        for name in self._entries:
            with self._folder.held(name, self._entry(name)):
                pass

    def fetch(self, shard: Shard) -> None:
        """Have a shard here, so that reading it does not wait for the network."""
        with self._folder.held(shard.file, self._entry(shard.file)):
            pass

    @property
    def fetches_ahead(self) -> bool:
        """Whether shards come over a network, and before they are wanted."""
        return self._folder.streams and self.streaming.prefetch > 0

    def to_dict(self) -> dict[str, Any]:
        """What a run records about where its features came from."""
        return {"source": "store", "path": str(self.path), **self.plan.contents.to_dict()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": OrderedDict()}


class StoredRows(PackedRows):
    """Packed rows whose features are read with them; everything else as :class:`PackedRows`."""

    def __init__(self, store: FeatureStore, split: str, rows: PackedRows) -> None:
        super().__init__(rows.tokens_T, rows.answer_T, rows.segment_stops_G, rows.row_stops_N)
        self.store = store
        self._shards = store.shards(split)
        self._ends = [shard.stop for shard in self._shards]
        self._token_stops_N = row_tokens(self).cumsum()

    def __getitem__(self, index: int) -> PackedRow:  # type: ignore[override]
        row = super().__getitem__(index)
        shard = self._shards[self._shard_number(index)]
        first = int(self._token_stops_N[shard.start - 1]) if shard.start else 0
        stop = int(self._token_stops_N[index]) - first
        return dataclasses.replace(row, features=self.store.read(shard, stop - len(row.tokens_S), stop))

    def _shard_number(self, index: int) -> int:
        return bisect.bisect_right(self._ends, index)

    def shuffle_groups(self, seed: int, epoch: int) -> NDArray[np.int64] | None:
        """int64 [N]: the group of every row; groups are read one after the other, each in random order.

        A group is ``shuffle_shards`` random shards, so that an epoch reads every shard once, and a few at a time. None:
        rows of the whole split in random order.
        """
        if self.store.shuffle_shards is None:
            return None
        place_H = np.empty(len(self._shards), np.int64)
        place_H[epoch_order(seed, epoch, len(self._shards))] = np.arange(len(self._shards))
        shard_N = np.searchsorted(np.array(self._ends), np.arange(len(self)), side="right")
        return place_H[shard_N] // self.store.shuffle_shards

    @property
    def order_name(self) -> str | None:
        if self.store.shuffle_shards is None:
            return None
        ends = hashlib.sha256(np.array(self._ends, np.int64).tobytes()).hexdigest()[:16]
        return f"{self.store.shuffle_shards} shards of {ends}"

    def follow(self, plan: Sequence[Sequence[int]], batches: Iterator[Batch]) -> Iterator[Batch]:
        """``batches``, whose rows are those of ``plan``, while the shards of the next ones are fetched."""
        if not self.store.fetches_ahead:
            return batches
        return self._with_shards_ahead(plan, batches)

    def _with_shards_ahead(self, plan: Sequence[Sequence[int]], batches: Iterator[Batch]) -> Iterator[Batch]:
        first_use: dict[int, int] = {}
        for number, rows in enumerate(plan):
            for row in rows:
                first_use.setdefault(self._shard_number(row if row >= 0 else ~row), number)
        with Ahead([(self._shards[shard], at) for shard, at in first_use.items()], self.store) as ahead:
            for number, batch in enumerate(batches):
                ahead.reached(number)
                yield batch


class Ahead:
    """Fetches shards in a thread, in the order of their first use, at most ``prefetch`` of them before it.

    Args:
        uses: shards and the batch that first reads each, in that order.
        store: theirs.
    """

    def __init__(self, uses: Sequence[tuple[Shard, int]], store: FeatureStore) -> None:
        self._uses, self._store = uses, store
        self._position = 0
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fetch, name="eaglelab-prefetch", daemon=True)

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    def reached(self, batch: int) -> None:
        """The batch is being used."""
        with self._changed:
            self._position = batch
            self._changed.notify()

    def _fetch(self) -> None:
        for number, (shard, _) in enumerate(self._uses):
            with self._changed:
                while not self._over and number >= self._begun() + self._store.streaming.prefetch:
                    self._changed.wait()
                if self._over:
                    return
            try:
                self._store.fetch(shard)
            except ValueError as error:  # who reads it gets the error; a later one may be there
                log.info("%s", error)

    def _begun(self) -> int:
        """Shards that were wanted by now."""
        return bisect.bisect_right([at for _, at in self._uses], self._position)


class StoreFeatures:
    """Decodes the features that travel with a batch. See :class:`~eaglelab.features.source.FeatureSource`."""

    def __init__(self, store: FeatureStore, target: FrozenTarget) -> None:
        self.contents, self.target = store.plan.contents, target

    @property
    def has_last_feature(self) -> bool:
        return self.contents.teacher == "feature"

    def plan(self, batch: Batch) -> None:
        """The target is not run."""

    def of(self, batch: Batch, taps: tuple[Tap, ...]) -> Features:
        return self.contents.decode(batch.features, taps, self.target.lm_head, self.target.dtype)
