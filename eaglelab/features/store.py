"""Reading a feature store: rows with their features, every file checked before its first use."""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eaglelab.data import Batch, PackedRow, PackedRows
from eaglelab.features import files
from eaglelab.features.manifest import feature_manifest
from eaglelab.features.plan import INDEX, MANIFEST, PLAN, Plan, Shard, rows_file, unpack_rows
from eaglelab.features.source import Features
from eaglelab.features.writer import row_tokens
from eaglelab.target import FEATURE_FIELDS, FeatureManifest, FrozenTarget, Tap

REPAIR = "run the eaglelab cache command of this store again, which writes damaged shards anew"


class FeatureStore:
    """A finished store.

    Sizes of all files and the digests of the small ones are checked on opening; the digest of a shard on its first
    use in each process.

    Attributes:
        path: the folder.
        plan, manifest: what it holds and what that means.

    Raises:
        ValueError: no store, an unfinished one, or a file that is missing, truncated or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / PLAN).is_file():
            raise ValueError(f"{self.path} holds no feature store; give the out= of eaglelab cache")
        self._entries = self._read_index()
        for name in (PLAN, MANIFEST):
            self._check_content(name)
        self.plan = Plan.from_json((self.path / PLAN).read_text(encoding="utf-8"), str(self.path / PLAN))
        self.manifest = FeatureManifest.load(self.path)
        self._names = self.plan.contents.names(self.plan.contents.streams)
        self._shards = {split: [s for s in self.plan.shards() if s.split == split] for split in self.plan.splits}
        self._opened: dict[str, Any] = {}
        self._process = os.getpid()

    def _read_index(self) -> dict[str, dict[str, Any]]:
        path = self.path / INDEX
        if not path.is_file():
            raise ValueError(f"the feature store {self.path} is unfinished; run its eaglelab cache command again")
        try:
            entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["files"]
            sizes = {name: int(entry["bytes"]) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {REPAIR}") from None
        for name, size in sizes.items():
            there = (self.path / name).stat().st_size if (self.path / name).is_file() else None
            if there != size:
                what = "is missing" if there is None else f"has {there:,} bytes instead of {size:,}"
                raise ValueError(f"{self.path / name} {what}; {REPAIR}")
        return entries

    def _check_content(self, name: str) -> None:
        if name not in self._entries:
            raise ValueError(f"{self.path / INDEX} does not list {name}; {REPAIR}")
        if files.digest_of(self.path / name) != self._entries[name].get("xxh128"):
            raise ValueError(f"{self.path / name} is damaged (its digest is not the recorded one); {REPAIR}")

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
        self._check_content(rows_file(split))
        rows = unpack_rows(self.path / rows_file(split))
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
            self._opened, self._process = {}, os.getpid()
        if shard.file not in self._opened:
            self._check_content(shard.file)
            try:
                self._opened[shard.file] = safe_open(self.path / shard.file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.path / shard.file} cannot be read ({error}); {REPAIR}") from None
        return self._opened[shard.file]

    def check_all(self) -> None:
        """Check the content of every file.

        Raises:
            ValueError: names the first damaged one.
        """
        for name in self._entries:
            self._check_content(name)

    def to_dict(self) -> dict[str, Any]:
        """What a run records about where its features came from."""
        return {"source": "store", "path": str(self.path), **self.plan.contents.to_dict()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}}


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
        shard = self._shards[bisect.bisect_right(self._ends, index)]
        first = int(self._token_stops_N[shard.start - 1]) if shard.start else 0
        stop = int(self._token_stops_N[index]) - first
        return dataclasses.replace(row, features=self.store.read(shard, stop - len(row.tokens_S), stop))


class StoreFeatures:
    """Decodes the features that travel with a batch. See :class:`~eaglelab.features.source.FeatureSource`."""

    def __init__(self, store: FeatureStore, target: FrozenTarget) -> None:
        self.contents, self.target = store.plan.contents, target

    @property
    def has_last_feature(self) -> bool:
        return self.contents.teacher == "feature"

    def of(self, batch: Batch, taps: tuple[Tap, ...]) -> Features:
        return self.contents.decode(batch.features, taps, self.target.lm_head, self.target.dtype)
