"""Out: a run's drafter as a folder that another project reads.

Letters: d hidden width, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eaglelab.assets import bundled_target
from eaglelab.drafters import DraftNetwork, FeatureDrafter
from eaglelab.formats import layouts
from eaglelab.formats.card import model_card
from eaglelab.formats.files import RECORD, whole_folder
from eaglelab.formats.layouts import EMBEDDING, FC_BIAS, Format
from eaglelab.target import FeatureManifest, FrozenTarget, default_taps
from eaglelab.training.run_folder import RunFolder

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RECORD_FORMAT = 1

# Of an evaluation's figures, those that the model card shows.
_FIGURES = ("tau", "tau_interval", "speedup", "answers", "accepted_by_depth", "identical")


def export_drafter(
    folder: RunFolder,
    format: str,
    out: str | Path,
    *,
    checkpoint: str = "last",
    dtype: str = "bfloat16",
    draft_tokens: int = 3,
    verifier: str | None = None,
    target_source: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``model.safetensors``, ``config.json``, ``README.md`` and our own ``eaglelab.json``.

    The same run and arguments give the same bytes, also after the export was imported.

    Args:
        format: a name of :data:`~eaglelab.formats.layouts.FORMATS`.
        dtype: of the weights; ``float32`` loses nothing.
        draft_tokens: suggested chain length, in launch commands and in speculators' config.
        verifier: where the client finds the target (speculators' config names it); None: the run's target.
        target_source: where the target lives now, if not where the run says.
        overwrite: replace an earlier export.

    Raises:
        ValueError: a format that cannot hold this drafter, with those that can; ``out`` exists.
        ManifestMismatch: the target is not the run's.
    """
    manifest = folder.manifest()
    shape = layouts.format_for(format, manifest.variant)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens={draft_tokens}: a chain has at least 1 draft token")
    network = folder.load_network(checkpoint)
    layouts.require_sayable(network.config, shape, format)
    layouts.require_readable_positions(network.config, format)
    bias = _bias(network, shape, format)
    _require_sayable_taps(network, manifest, format)
    target = folder.load_target(source=target_source, dtype=dtype)
    _require_default_taps(network, manifest, target, shape, format)
    embedding_Vd = embedding_table(target)
    if not shape.embedding and not shares_embedding(target, embedding_Vd):
        raise ValueError(
            f"target {manifest.target.source} scales its embedding, but readers of format={format} take the target's "
            "table as it is stored; only a format that carries the embedding can say so"
        )
    tensors = _tensors(network, format, DTYPES[dtype], bias)
    if shape.embedding:
        tensors[EMBEDDING] = embedding_Vd.to(DTYPES[dtype]).contiguous()
    config = _config(network, manifest, target, format, dtype, bias, draft_tokens, verifier)
    whole = dataclasses.replace(manifest, drafter=network.config.to_dict())  # an older run's may lack newer fields
    record = _record(whole, folder.read_metrics(), format)
    with whole_folder(out, overwrite, lambda old: (old / RECORD).is_file()) as fresh:
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        _write_json(fresh / "config.json", config)
        _write_json(fresh / RECORD, record)
        card = model_card(record, format, shape, network, dtype, draft_tokens)
        (fresh / "README.md").write_text(card, encoding="utf-8")
    return Path(out)


def embedding_table(target: FrozenTarget) -> Tensor:
    """[V, d]: every token's embedding as the target's first layer is fed it."""
    return target.embed(torch.arange(target.embedding_size, device=target.device)).cpu()


def shares_embedding(target: FrozenTarget, embedding_Vd: Tensor) -> bool:
    """Whether the stored table is what the first layer is fed, so that a client may use it as it is."""
    return bool(torch.equal(target.model.get_input_embeddings().weight.cpu(), embedding_Vd))


def _bias(network: DraftNetwork, shape: Format, name: str) -> bool:
    """Whether the file has ``fc.bias``."""
    feature = isinstance(network, FeatureDrafter)
    rule = shape.bias if feature else "never"
    value = network.state_dict().get(FC_BIAS)
    if rule == "never" and value is not None and bool(value.any()):
        way_out = ", or use format=eagle or format=sglang" if feature else ""
        raise ValueError(
            f"format={name} has no bias in fc and its readers would drop it, but this drafter was trained with one; "
            f"train with variant.drafter.fc_bias=false{way_out}"
        )
    return rule == "always" or (rule == "as trained" and value is not None)


def _require_sayable_taps(network: DraftNetwork, manifest: FeatureManifest, name: str) -> None:
    if isinstance(network, FeatureDrafter):
        if manifest.taps != ("final",):
            raise ValueError(
                f"readers of format={name} feed an EAGLE-1 drafter the last hidden state after the final norm, but "
                f"this one was trained on taps={list(manifest.taps)}; it cannot be exported"
            )
    elif not all(isinstance(tap, int) for tap in manifest.taps):
        raise ValueError(
            f"taps={list(manifest.taps)}: no format has a name for the state after the final norm; train with "
            "variant.taps that are layer numbers"
        )
    elif list(manifest.taps) != sorted(manifest.taps, key=int):
        raise ValueError(
            f"taps={list(manifest.taps)}: servers concatenate the streams in ascending order whatever the list says; "
            "train with variant.taps in that order to export"
        )


def published_taps(manifest: FeatureManifest, target: FrozenTarget) -> bool:
    """Whether the taps are those that every reader takes by default."""
    try:
        return manifest.taps == default_taps(target.num_layers)
    except ValueError:  # a target too shallow to have them
        return False


def _require_default_taps(
    network: DraftNetwork, manifest: FeatureManifest, target: FrozenTarget, shape: Format, name: str
) -> None:
    if isinstance(network, FeatureDrafter) or shape.custom_taps or published_taps(manifest, target):
        return
    others = [one for one, f in layouts.FORMATS.items() if f.custom_taps and manifest.variant in f.variants]
    raise ValueError(
        f"readers of format={name} tap layers 2, L // 2 and L - 3 whatever the file says, but this drafter was trained "
        f"on taps={list(manifest.taps)}; use format={' or '.join(others)}"
    )


def _tensors(network: DraftNetwork, name: str, dtype: torch.dtype, bias: bool) -> dict[str, Tensor]:
    """The network's state under the format's names; floating tensors in ``dtype``."""
    state = dict(network.state_dict())
    if bias and FC_BIAS not in state:
        state[FC_BIAS] = torch.zeros(network.config.hidden_size)
    if not bias:
        state.pop(FC_BIAS, None)
    return {
        layouts.file_name(key, name == "speculators"): (
            value.to(dtype) if value.is_floating_point() else value
        ).contiguous()
        for key, value in state.items()
    }


def _config(
    network: DraftNetwork,
    manifest: FeatureManifest,
    target: FrozenTarget,
    name: str,
    dtype: str,
    bias: bool,
    draft_tokens: int,
    verifier: str | None,
) -> dict[str, Any]:
    config = network.config
    if isinstance(network, FeatureDrafter):
        return layouts.feature_keys(config, name, dtype, bias)
    if name == "speculators":
        source = manifest.target.source
        where = verifier or (bundled_target() if source == "bundled" else source)
        architectures = list(getattr(target.model.config, "architectures", None) or [type(target.model).__name__])
        return layouts.speculators_keys(config, dtype, manifest.taps, where, architectures, draft_tokens)
    return layouts.fused_keys(config, name, dtype, manifest.taps, published_taps(manifest, target))


def _record(manifest: FeatureManifest, metrics: dict[str, Any], name: str) -> dict[str, Any]:
    """Our own facts, without paths of this machine."""
    source = manifest.target.source
    if Path(source).is_absolute():
        manifest = dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, source=Path(source).name))
    figures = {key: metrics[key] for key in _FIGURES if key in metrics}
    if figures:
        settings = metrics.get("settings", {})
        figures["settings"] = {
            key: settings[key] for key in ("tree", "temperature", "max_new_tokens") if key in settings
        }
    return {"record": RECORD_FORMAT, "format": name, "manifest": manifest.to_dict(), "metrics": figures}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
