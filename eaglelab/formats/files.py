"""The files of a drafter: read without running anything in them, written whole or not at all."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

RECORD = "eaglelab.json"
"""Beside our exports: manifest and figures, which config.json has no keys for."""

_STORES = ("model.safetensors", "pytorch_model.bin")
_HUB_TIMEOUT_S = 5


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's files as plain data.

    Attributes:
        source: what the user named.
        config: ``config.json``.
        tensors: by the file's own names, on the CPU.
        record: our own ``eaglelab.json``; None beside foreign files.
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    record: dict[str, Any] | None


def read_checkpoint_folder(source: str, revision: str | None = None) -> Checkpoint:
    """Read a folder, or a hub repository (its local copy when offline).

    ``.bin`` files are unpickled with ``weights_only``: tensors and plain values, never code.

    Raises:
        ValueError: nothing there, a file missing, truncated, not what its name says, or holding code.
    """
    folder = _locate(source, revision)
    config = _read_json(folder / "config.json", "a drafter's folder has its shape in it")
    record = _read_json(folder / RECORD, "") if (folder / RECORD).is_file() else None
    return Checkpoint(source, config, _read_tensors(folder), record)


def _locate(source: str, revision: str | None) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"source={source} is a file; give the folder that holds it together with config.json")
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise ValueError(f"source={source} does not exist; give a folder, or a hub id such as OWNER/NAME")
    return _download(source, revision)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.bin"]
    cause = ""
    for local in (False, True):
        try:
            return Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=wanted,
                    local_files_only=local,
                    etag_timeout=_HUB_TIMEOUT_S,
                )
            )
        except Exception as error:  # offline, unknown, gated or malformed: the local copy decides
            cause = cause or (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(
        f"source={repo!r} is no folder here, is not in the local hub cache and could not be had from the hub "
        f"({cause}). Check the spelling and the network, or give the path of a folder."
    )


def _read_json(path: Path, why: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; {why}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); get the file again") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not an object; get the file again")
    return values


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    for store in _STORES:
        index = folder / f"{store}.index.json"
        if (folder / store).is_file():
            return _read_store(folder / store)
        if index.is_file():
            return _read_shards(folder, index)
    found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(f"{folder} has no {' or '.join(_STORES)} (nor their shards); it holds {found}")


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    places = _read_json(index, "").get("weight_map")
    if not isinstance(places, dict):
        raise ValueError(f"{index} has no weight_map; get the file again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{index.name} names the shard {name!r}, which is not in {folder}; get all shards")
        shard = _read_store(folder / name)
        wrong = sorted(tensor for tensor in shard if places.get(tensor) != name)
        if wrong:
            raise ValueError(f"{folder / name} holds {wrong[0]}, which {index.name} does not place there")
        tensors |= shard
    if absent := sorted(set(places) - set(tensors)):
        raise ValueError(f"{index.name} lists {absent[0]}, which no shard holds; get all shards again")
    return tensors


def _read_store(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        values = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); get the file again") from None
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):
            raise ValueError(
                f"{path} is a pickle that wants to run code when it is read, so it was not. Ask its author for "
                "safetensors, or for a file of tensors alone."
            ) from None
        raise ValueError(
            f"{path} is damaged, or a pickle of more than tensors, which is not read; get it again, or as safetensors"
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is truncated or no PyTorch file ({reason}); get the file again") from None
    if not isinstance(values, dict) or not all(isinstance(one, Tensor) for one in values.values()):
        raise ValueError(f"{path} does not hold tensors by name; give a drafter's state dict")
    return values


@contextmanager
def whole_folder(out: str | Path, overwrite: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A new folder to write into, which becomes ``out`` at the end; after an error nothing is left of it.

    Args:
        overwrite: replace an earlier ``out``.
        is_ours: whether an existing ``out`` is something that may be replaced.

    Raises:
        ValueError: ``out`` is there already and may not be replaced.
    """
    out = Path(out).absolute()
    taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    if taken and not overwrite:
        raise ValueError(f"out={out} is there already; pass overwrite=true to replace it, or choose another folder")
    if taken and not (out.is_dir() and is_ours(out)):
        raise ValueError(f"out={out} holds something that eaglelab did not write; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        fresh = aside / "new"
        fresh.mkdir()
        yield fresh
        if out.exists():
            out.rename(aside / "old")
        fresh.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
