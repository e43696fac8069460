"""Which target is this? SHA-256 over its config, its stored weights and its tokenizer.

Two artefacts belong together only if these agree. The weight digest is that of the *stored*
checkpoint, tensor by tensor, so it depends neither on the type the target is loaded in nor on how
the file is cut into shards. A GGUF file is one tensor store with its own packing: its bytes are
hashed as they are. Models made in memory hash their parameters as they stand.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget

log = logging.getLogger(__name__)

# What changes in a config without changing what the model computes.
_VOLATILE = frozenset(
    {
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "dtype",
        "torch_dtype",
        "architectures",
        "_commit_hash",
        "_attn_implementation",
        "attn_implementation",
        "_attn_implementation_internal",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "quantization_config",
    }
)
_PROBE_TEXT = "Hello, wörld!\n\n  x1 = 3.14 * 2026 — tests\tdone. 你好 🙂"
_STORED_KINDS = {  # safetensors names of types in torch's words
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_FORMAT = 1  # of the digests kept on disk

T = TypeVar("T")


@dataclass(frozen=True)
class TargetFingerprint:
    """Identity of a target. The three digests decide; source and revision say where it came from.

    ``tokenizer`` is "none" for a target without one.
    """

    config: str
    weights: str
    tokenizer: str
    source: str = "memory"
    revision: str | None = None

    @property
    def digests(self) -> dict[str, str]:
        return {"config": self.config, "weights": self.weights, "tokenizer": self.tokenizer}

    @property
    def short(self) -> str:
        """Twelve hex digits over the three digests, for file names and tables."""
        return hashlib.sha256(_canonical(self.digests)).hexdigest()[:12]

    def same_target(self, other: TargetFingerprint) -> bool:
        """True if config, weights and tokenizer agree, wherever they were loaded from."""
        return self.digests == other.digests

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TargetFingerprint:
        return cls(**fields)


def fingerprint_target(target: FrozenTarget) -> TargetFingerprint:
    """Fingerprint of a wrapped target, of its files where it was loaded from files.

    Raises:
        ValueError: a weight is NaN or infinite, with the tensor's name.
    """
    place = target.checkpoint_files
    folder = place.folder if place is not None else None
    if folder is not None and place is not None and place.gguf_file is not None:
        weights = _kept_on_disk([folder / place.gguf_file], _whole_file_digest)
    elif folder is not None and (stored := stored_weights(folder)) is not None:
        weights = _kept_on_disk(*stored)
    else:
        weights = weights_digest(target.model.state_dict())
    return TargetFingerprint(
        config=config_digest(target.model.config, folder),
        weights=weights,
        tokenizer=tokenizer_digest(target.tokenizer),
        source=target.source,
        revision=target.revision,
    )


# --- config and tokenizer -----------------------------------------------------------------------


def config_digest(config: Any, folder: Path | None = None) -> str:
    """Digest of a config's own settings (those that differ from the library's defaults)."""
    fields: Any = config.to_diff_dict()
    if folder is not None and (folder / "config.json").is_file():
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return hashlib.sha256(_canonical(_without_volatile(fields))).hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of vocabulary, merges, special tokens, chat template and a probe text's split."""
    if tokenizer is None:
        return "none"
    merges: Any = None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        merges = json.loads(backend.to_str())["model"].get("merges")
        if merges is not None:
            merges = [m if isinstance(m, str) else " ".join(m) for m in merges]
    special = {key: str(value) for key, value in sorted(tokenizer.special_tokens_map.items())}
    fields = {
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])),
        "merges": merges,
        "special": special,
        "chat_template": getattr(tokenizer, "chat_template", None),
        "probe": tokenizer.encode(_PROBE_TEXT, add_special_tokens=False),
    }
    return hashlib.sha256(_canonical(fields)).hexdigest()


def _without_volatile(fields: Any) -> Any:
    if isinstance(fields, dict):
        return {k: _without_volatile(v) for k, v in fields.items() if k not in _VOLATILE}
    if isinstance(fields, list | tuple):
        return [_without_volatile(v) for v in fields]
    return fields


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str).encode()


# --- weights --------------------------------------------------------------------------------------


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest over every tensor's name, type, shape and bytes, in the order of the names.

    Tensors that share storage (tied weights) count once, under the name that comes first.

    Raises:
        ValueError: a floating tensor holds NaN or infinite values.
    """
    seen: set[tuple[int, int]] = set()
    kept: dict[str, Tensor] = {}
    for name, value in tensors.items():
        tensor = value.detach()
        key = (tensor.data_ptr(), tensor.numel())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor

    def digest(item: tuple[str, Tensor]) -> str:
        name, tensor = item
        tensor = tensor.cpu().contiguous()
        if tensor.is_floating_point():
            _require_finite(name, tensor)
        raw = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
        kind = str(tensor.dtype).removeprefix("torch.")
        return _tensor_digest(name, kind, tuple(tensor.shape), raw)

    return _combine(sorted(kept.items()), digest)


def _safetensors_digest(files: list[Path]) -> str:
    """`weights_digest` of stored files, read through the page cache without loading them."""
    entries: list[tuple[str, Path, dict[str, Any], int]] = []
    for file in files:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        entries += [(name, file, entry, 8 + size) for name, entry in header.items()]

    def digest(item: tuple[str, Path, dict[str, Any], int]) -> str:
        name, file, entry, base = item
        first, last = entry["data_offsets"]
        kind = _STORED_KINDS.get(entry["dtype"], entry["dtype"])
        raw = np.empty(0, np.uint8)
        if last > first:  # copy-on-write: a plain array to torch, nothing ever reaches the file
            raw = np.memmap(file, np.uint8, mode="c", offset=base + first, shape=(last - first,))
            dtype = getattr(torch, kind, None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
                _require_finite(name, torch.from_numpy(raw).view(dtype))
        return _tensor_digest(name, kind, tuple(entry["shape"]), raw)

    return _combine(sorted(entries, key=lambda item: item[0]), digest)


def _torch_files_digest(files: list[Path]) -> str:
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    return weights_digest(tensors)


def _whole_file_digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _require_finite(name: str, tensor: Tensor) -> None:
    # A sum is the cheapest scan; it is exact about NaN and infinity up to overflow, so confirm.
    if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))) and not bool(torch.isfinite(tensor).all()):
        raise ValueError(
            f"target weights: tensor {name!r} holds NaN or infinite values. The checkpoint is "
            "broken or was saved in a type that overflowed; download or convert it again."
        )


def _tensor_digest(name: str, kind: str, shape: tuple[int, ...], raw: np.ndarray) -> str:
    digest = hashlib.sha256(_canonical([name, kind, list(shape)]))
    digest.update(memoryview(raw))  # type: ignore[arg-type]
    return digest.hexdigest()


def _combine(items: Iterable[T], digest: Callable[[T], str]) -> str:
    """Hash tensors side by side (hashing releases the interpreter lock), combine in order."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return hashlib.sha256("".join(pool.map(digest, items)).encode()).hexdigest()


# --- the digest of a big checkpoint is worth keeping ----------------------------------------------


def cache_folder() -> Path:
    """Where eaglelab keeps what it can recompute: ``$EAGLELAB_CACHE`` or ``~/.cache/eaglelab``."""
    chosen = os.environ.get("EAGLELAB_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "eaglelab"


def stored_weights(folder: Path) -> tuple[list[Path], Callable[[list[Path]], str]] | None:
    """The files the library loads from a checkpoint folder, and how they are hashed."""
    formats = (("model.safetensors", _safetensors_digest), ("pytorch_model.bin", _torch_files_digest))
    for stem, digest in formats:
        index = folder / f"{stem}.index.json"
        if (folder / stem).is_file():
            return [folder / stem], digest
        if index.is_file():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / shard for shard in sorted(shards)], digest
    return None


def _kept_on_disk(files: list[Path], compute: Callable[[list[Path]], str]) -> str:
    """Compute once per set of files: they are recognised by path, size and time of change.

    A cache folder that cannot be read or written only costs the time.
    """
    stats = [(str(file.resolve()), file.stat()) for file in files]
    key = _canonical([[_FORMAT], *([p, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for p, s in stats)])
    note = cache_folder() / "fingerprints" / f"{hashlib.sha256(key).hexdigest()}.json"
    try:
        return str(json.loads(note.read_text(encoding="utf-8"))["weights"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    weights = compute(files)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({"weights": weights}), encoding="utf-8")
        draft.replace(note)
    except OSError as error:
        log.debug("fingerprint not kept in %s: %s", note.parent, error)
    return weights
