"""The plan of a store, ``store.json``: everything that decides its bytes, written before the first shard.

A store is a folder:

manifest.json                what the features mean
store.json                   this plan
train.rows.safetensors       tokens, answers, segments and rows of a split
train-00000.safetensors      features of a shard's rows, in order, one tensor per stored part, [tokens, n]
train-00000.safetensors.xxh128   its digest; a shard without it is unfinished
index.json                   size and digest of every file; a store without it is unfinished
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from eaglelab.data import DataReport, PackedRows, SplitReport
from eaglelab.features.contents import Contents
from eaglelab.target import FeatureManifest

FORMAT = 1
PLAN = "store.json"
MANIFEST = "manifest.json"
INDEX = "index.json"
DIGEST = ".xxh128"
SPLITS = ("train", "val")

ROW_SETTINGS = (
    "limit",
    "val_limit",
    "val_fraction",
    "max_length",
    "overlength",
    "packing",
    "row_length",
    "supervise",
    "chat_template",
)
"""Settings of the data that decide which rows there are."""


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows of a split: digest of all of them, and the row at which each shard ends."""

    digest: str
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a store will hold.

    Attributes:
        contents: stored tensors of a token.
        splits: ``train`` and, with validation data, ``val``.
        data: :data:`ROW_SETTINGS` by name; the chat template as its digest.
        report: what became of the conversations.
        shard_bytes: about the size of a shard.
        batch_tokens: token slots of a forward pass of the target.
        padding_share: padding of all token slots of those passes, 0..1.
    """

    contents: Contents
    splits: Mapping[str, Split]
    data: Mapping[str, Any]
    report: DataReport
    shard_bytes: int
    batch_tokens: int
    padding_share: float

    def to_json(self) -> str:
        values = dataclasses.asdict(self) | {"format": FORMAT, "contents": self.contents.to_dict()}
        return json.dumps(values, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Plan:
        """Read a plan.

        Raises:
            ValueError: it is none, or of a newer format.
        """
        try:
            values = json.loads(text)
            version = values.pop("format")
            if version != FORMAT:
                raise ValueError(f"{where} has format {version}, this eaglelab reads {FORMAT}; cache the store again")
            report = {name: part and SplitReport(**part) for name, part in values["report"].items()}
            splits = {name: Split(part["digest"], tuple(part["shards"])) for name, part in values["splits"].items()}
            made = {
                "contents": Contents.from_dict(values["contents"]),
                "splits": splits,
                "report": DataReport(**report),
            }
            return cls(**{**values, **made})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{where} is no plan of a feature store ({type(error).__name__}: {error}); cache the store again"
            ) from None

    def shards(self) -> list[Shard]:
        """All shards in order; the order decides which process writes which."""
        return [
            Shard(name, number, start, stop)
            for name, split in self.splits.items()
            for number, (start, stop) in enumerate(zip((0, *split.shards[:-1]), split.shards))
        ]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Rows ``start`` to ``stop`` of a split."""

    split: str
    number: int
    start: int
    stop: int

    @property
    def file(self) -> str:
        return f"{self.split}-{self.number:05d}.safetensors"


def rows_file(split: str) -> str:
    return f"{split}.rows.safetensors"


def pack_rows(rows: PackedRows) -> bytes:
    """The arrays of packed rows as a safetensors file."""
    arrays = {name: getattr(rows, name) for name in ("tokens_T", "answer_T", "segment_stops_G", "row_stops_N")}
    return save({name: torch.from_numpy(array) for name, array in arrays.items()})


def unpack_rows(path: Path) -> PackedRows:
    """The inverse.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        return PackedRows(**{name: tensor.numpy() for name, tensor in load_file(path).items()})
    except (SafetensorError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete it and run the same eaglelab cache command again"
        ) from None


def first_difference(recorded: Any, present: Any, name: str) -> tuple[str, Any, Any] | None:
    """The first field, by name, in which two JSON values differ, and both values."""
    if isinstance(recorded, dict) and isinstance(present, dict):
        for key in sorted({*recorded, *present}):
            inner = first_difference(recorded.get(key), present.get(key), f"{name}.{key}" if name else key)
            if inner is not None:
                return inner
        return None
    return None if recorded == present else (name, recorded, present)


def require_same_plan(folder: Path, plan: Plan, manifest: FeatureManifest) -> None:
    """Refuse to continue a store that was begun with other settings.

    Raises:
        ValueError: names the first field that differs and both values.
    """
    for name, present in ((MANIFEST, manifest.to_dict()), (PLAN, json.loads(plan.to_json()))):
        _forget(present)
        path = folder / name
        if not path.is_file():
            continue
        try:
            recorded = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); delete it and run the same command again") from None
        _forget(recorded)
        difference = first_difference(recorded, present, "")
        if difference is not None:
            where, was, now = difference
            raise ValueError(
                f"out={folder} holds a store that was begun with other settings: {where} was {was!r} and is {now!r} "
                "now; repeat the old settings to continue it, or choose another folder"
            )


def _forget(values: dict[str, Any]) -> None:
    """Leave out where the target was loaded from, and what follows from the rest."""
    values.pop("padding_share", None)
    for field in ("source", "revision"):
        values.get("target", {}).pop(field, None)
