"""Loading a target: hub id, folder or GGUF file in; a complete causal LM or one clear line out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "spiece.model",
    "tekken.json",
)
_HUB_TIMEOUT_S = 5

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "float32",
        "device": "cpu",
        "revision": None,
        "trust_remote_code": False,
        "gguf_file": None,
        "attn_implementation": "sdpa",
    }
)
"""What :func:`load` is given where a caller has no wish."""


@dataclass(frozen=True)
class Location:
    """Where a checkpoint lies: ``name`` is what the library loads, ``folder`` where its files are
    (None for a hub id that is not on this machine yet)."""

    name: str
    folder: Path | None
    revision: str | None
    gguf_file: str | None
    offline: bool

    @property
    def source(self) -> str:
        """What loads the same checkpoint again from any working directory."""
        if self.folder is None or str(self.folder) != self.name:
            return self.name
        folder = self.folder.absolute()
        return str(folder / self.gguf_file if self.gguf_file else folder)


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """``"bf16"``, ``"float32"`` ... as a torch type.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype.removeprefix("torch.") not in DTYPES:
        raise ValueError(f"target dtype {dtype!r} is unknown: use one of {', '.join(DTYPES)}.")
    return DTYPES[dtype.removeprefix("torch.")]


def locate(source: str | Path, revision: str | None, gguf_file: str | None) -> Location:
    """Decide what ``source`` means, without ever waiting on an unreachable network.

    Raises:
        ValueError: no such folder or file, and not a hub repository that can be had.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Location(str(path.parent), path.parent, None, path.name, True)
    if path.is_dir():
        if not (path / "config.json").is_file() and gguf_file is None:
            found = sorted(p.name for p in path.glob("*.gguf"))
            hint = f" Did you mean the file {path / found[0]}?" if found else ""
            raise ValueError(
                f"target folder {path} has no config.json, so it holds no Hugging Face model.{hint}"
                " Give the folder that save_pretrained wrote."
            )
        if gguf_file is not None and not (path / gguf_file).is_file():
            raise ValueError(f"target folder {path} has no file {gguf_file}: check gguf_file.")
        return Location(str(path), path, None, gguf_file, True)
    text = str(source)
    if path.is_file() or path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        kind = "is a file, not a model" if path.is_file() else "does not exist"
        raise ValueError(
            f"target {text} {kind}. Give a folder with config.json and weights, a .gguf file, "
            "or a Hugging Face hub id such as HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    return _locate_on_hub(text, revision, gguf_file)


def _locate_on_hub(repo: str, revision: str | None, gguf_file: str | None) -> Location:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    probe = gguf_file or "config.json"
    cause = ""
    try:
        url = hf_hub_url(repo, probe, revision=revision)
        get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S)
        return Location(repo, None, revision, gguf_file, offline=False)
    except Exception as error:  # offline, unknown, gated or malformed: the local copy decides
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    try:
        cached = try_to_load_from_cache(repo, probe, revision=revision)
    except Exception:  # the name is not even a legal hub id
        cached = None
    if isinstance(cached, str):
        log.info("hub not reachable (%s); using the local copy of %s", cause, repo)
        return Location(repo, Path(cached).parent, revision, gguf_file, offline=True)
    at = f" at revision {revision}" if revision else ""
    raise ValueError(
        f"target {repo!r}{at} is no folder here, is not in the local hub cache and could not be "
        f"had from the hub ({cause}). Check the spelling, or give the path of a local folder."
    )


def load(
    source: str | Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device,
    revision: str | None,
    trust_remote_code: bool,
    gguf_file: str | None,
    attn_implementation: str,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, Any, Location]:
    """Load model and tokenizer (None if the checkpoint has none) of any causal LM.

    Args:
        extra: further arguments of the library's ``from_pretrained`` for the model alone.

    Raises:
        ValueError: nothing to load at ``source``, not a causal LM, or weights missing from it.
    """
    from transformers import AutoModelForCausalLM

    torch_dtype = as_dtype(dtype)
    require_device(device)
    place = locate(source, revision, gguf_file)
    common: dict[str, Any] = {
        "revision": place.revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": place.offline,
    }
    if place.gguf_file is not None:
        common["gguf_file"] = place.gguf_file
    common = {key: value for key, value in common.items() if value is not None}

    def pretrained(attention: str) -> tuple[Any, dict[str, Any]]:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place.name,
            dtype=torch_dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by name below
            **common,
            **extra,
        )
        return loaded  # the model and what was missing

    try:
        try:
            model, info = pretrained(attn_implementation)
        except ValueError as error:
            if attn_implementation != "sdpa" or "eager" not in str(error):
                raise
            model, info = pretrained("eager")  # the family has no sdpa path
    except Exception as error:
        raise ValueError(
            f"target {source} could not be loaded as a causal language model: {cause_of(error)}"
        ) from error
    _refuse_missing(source, info)
    if place.gguf_file is not None:
        _drop_quantisation(model)
    model = model.to(device)
    if place.folder is None or str(place.folder) != place.name:  # from the hub: note the commit
        folder = place.folder or _snapshot_folder(place)
        place = replace(place, folder=folder, revision=folder.name if folder else place.revision)
    return model, load_tokenizer(place, common), place


def cause_of(error: Exception) -> str:
    """The library's error in one line, with the way out where there is one."""
    if "trust_remote_code" in str(error):
        return "it brings its own modelling code. If you have read that code and trust it, pass trust_remote_code=true"
    return _first_line(error)


def require_device(device: str | torch.device) -> None:
    """Raises ValueError for a device that this machine, or this build of torch, does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device} cannot be used here ({_first_line(error)}); use cpu, or cuda") from None


def _refuse_missing(source: str | Path, info: dict[str, Any]) -> None:
    missing = sorted(map(str, info.get("missing_keys") or ()))
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get("mismatched_keys") or ())
    if missing or mismatched:
        names = [*missing, *mismatched]
        raise ValueError(
            f"target {source}: {len(names)} tensors of the model are missing from the checkpoint "
            f"or have another shape ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''}); "
            "they would be random. Give a complete causal-LM checkpoint (not a bare base model)."
        )


def _drop_quantisation(model: Any) -> None:
    """GGUF weights are dequantised on load; without its note the model saves like any other."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False


def _snapshot_folder(place: Location) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(place.name, place.gguf_file or "config.json", revision=place.revision)
    return Path(cached).parent if isinstance(cached, str) else None


def load_tokenizer(place: Location, common: dict[str, Any]) -> Any:
    """The tokenizer of a checkpoint; None if it has none.

    Args:
        common: further arguments of the library's ``from_pretrained``.

    Raises:
        ValueError: a folder's tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    local_folder = place.folder is not None and str(place.folder) == place.name
    if (
        local_folder
        and place.gguf_file is None
        and not any((Path(place.name) / name).is_file() for name in _TOKENIZER_FILES)
    ):
        return None
    try:
        return AutoTokenizer.from_pretrained(place.name, **common)
    except Exception as error:
        if local_folder:
            raise ValueError(f"the tokenizer in {place.name} could not be loaded: {_first_line(error)}") from error
        log.warning("no tokenizer came with %s: %s", place.name, _first_line(error))
        return None


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def check_vocabulary(tokenizer: Any, embedding_rows: int, from_gguf: bool = False) -> None:
    """Refuse a tokenizer that can produce ids the embedding does not have.

    The library's GGUF conversion appends an end-of-text token to vocabularies that have none;
    plain text never produces it, so added tokens are not counted there.

    Raises:
        ValueError: its largest id lies outside the embedding.
    """
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.get_added_vocab() if from_gguf else {}
    largest = max((i for token, i in vocabulary.items() if token not in added), default=-1)
    if largest >= embedding_rows:
        raise ValueError(
            f"the tokenizer has token id {largest} but the target's embedding has only "
            f"{embedding_rows} rows: they do not belong together. Use the target's own tokenizer, "
            "or resize and save the target's embedding first."
        )
