"""In: a published drafter becomes a run folder, or one clear line says why not.

Letters: d hidden width, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglelab.data.draft_vocabulary import DraftVocabulary
from eaglelab.drafters import DrafterConfig, DraftNetwork
from eaglelab.features.manifest import feature_manifest
from eaglelab.formats import layouts
from eaglelab.formats.exporting import RECORD_FORMAT, embedding_table, published_taps, shares_embedding
from eaglelab.formats.files import Checkpoint, read_checkpoint_folder, whole_folder
from eaglelab.formats.layouts import EMBEDDING, FC_BIAS, MAPS
from eaglelab.target import FeatureManifest, FrozenTarget, Tap, default_taps, validate_taps
from eaglelab.training.run_folder import RunFolder
from eaglelab.variants import VARIANTS
from eaglelab.variants.manifest import WEIGHT_FIELDS

READABLE = ("eagle", "eagle3", "speculators")
"""Formats to read; the files for vLLM and SGLang are spellings of the first two."""
TRUSTABLE = ("target", "embedding")


@dataclasses.dataclass(frozen=True)
class Imported:
    """A drafter that passed every check.

    Attributes:
        format: ``eagle``, ``eagle3`` or ``speculators``.
        manifest: what is known; the rest says "unknown".
        weights: the network's state, fp32.
        notes: one line for each thing that was checked, and for each that could not be.
        metrics: figures that came with our own exports.
    """

    format: str
    manifest: FeatureManifest
    weights: dict[str, Tensor]
    notes: list[str]
    metrics: dict[str, Any]

    @property
    def config(self) -> DrafterConfig:
        return DrafterConfig(**self.manifest.drafter)

    def network(self) -> DraftNetwork:
        """The network with its weights, fp32 on the CPU."""
        network = VARIANTS[self.manifest.variant].build_network(self.config)
        network.load_state_dict(self.weights, strict=True)
        return network


def import_drafter(
    source: str | Path, target: FrozenTarget, out: str | Path, *, overwrite: bool = False, **how: Any
) -> Imported:
    """Read a drafter and write it as a run folder: it evaluates, generates, trains on and exports like our own.

    Args:
        source, target, how: see :func:`read_drafter`.
        out: the new run folder.
        overwrite: replace an earlier import.

    Raises:
        ValueError: see :func:`read_drafter`; or ``out`` exists. Nothing is written then.
    """
    drafter = read_drafter(source, target, **how)
    with whole_folder(out, overwrite, lambda old: "imported" in RunFolder(old).read_metrics()) as fresh:
        folder = RunFolder(fresh)
        drafter.manifest.save(folder.manifest_path)
        folder.checkpoints.mkdir()
        state = {f"network.{name}": value for name, value in drafter.weights.items()}
        torch.save({"state_dict": state, "manifest": drafter.manifest.to_dict()}, folder.checkpoints / "last.ckpt")
        imported = {"source": str(source), "format": drafter.format, "notes": drafter.notes}
        folder.update_metrics({"imported": imported} | drafter.metrics)
    return drafter


def read_drafter(
    source: str | Path,
    target: FrozenTarget,
    *,
    format: str | None = None,
    variant: str | None = None,
    taps: Sequence[Tap] | None = None,
    trust: str | Sequence[str] = (),
    revision: str | None = None,
) -> Imported:
    """Read a published drafter strictly and check it against its target.

    Args:
        source: a folder or hub id.
        target: the target that it drafts for.
        format: one of :data:`READABLE`; None: as the files say.
        variant: ``hass`` for a HASS checkpoint, which looks like EAGLE-1's; None: ``eagle`` or ``eagle3``.
        taps: streams read, where the files leave it open or disagree.
        trust: what to take on trust where it cannot be checked or differs: ``target``, ``embedding``.
        revision: of the hub repository.

    Raises:
        ValueError: names the tensor, key or file at fault.
    """
    trusted = tuple([trust] if isinstance(trust, str) else trust)
    for one in trusted:
        if one not in TRUSTABLE:
            raise ValueError(f"trust={one!r} is not one of {', '.join(TRUSTABLE)}")
    files = read_checkpoint_folder(str(source), revision)
    kind = _detect(files, format)
    fused = kind != "eagle"
    config = _drafter_config(files, kind, target)
    streams = _taps(files, target, taps) if fused else ("final",)
    config = dataclasses.replace(config, num_taps=len(streams))
    tensors = {layouts.network_name(name, fused): value for name, value in files.tensors.items()}
    if len(tensors) < len(files.tensors):
        raise ValueError(f"{files.source} holds the decoder layer twice, as midlayer.* and layers.0.*; keep one")
    embedding = tensors.pop(EMBEDDING, None)
    name = _variant(kind, variant)
    network = VARIANTS[name].build_network(config)
    weights = _weights(files, tensors, network, kind)
    _check_maps(weights, config)
    notes = [_check_embedding(embedding, target, trusted)]
    manifest = _manifest(config, name, streams, weights, target, kind)
    metrics: dict[str, Any] = {}
    if files.record is not None:
        manifest, weights, metrics = _ours(files, manifest, weights, target, trusted, variant)
        notes.append("written by eaglelab: the manifest came with it")
    else:
        notes.append(_require_trust(embedding is not None, target, trusted))
    imported = Imported(kind, manifest, weights, notes, metrics)
    imported.network()  # the tensors are exactly the drafter's
    return imported


def training_overrides(drafter: Imported, target: FrozenTarget) -> list[str]:
    """Settings of ``train.py`` with which a new training has this drafter's shape, for ``init_from``."""
    config = drafter.config
    default = DrafterConfig.from_target(target.text_config).to_dict() | {
        "fc_bias": drafter.manifest.variant != "eagle3"
    }
    overrides = [f"variant={drafter.manifest.variant}"]
    for name, value in config.to_dict().items():
        if name in ("num_taps", "draft_vocab_size") or value == default[name]:
            continue
        text = "{" + ",".join(f"{k}:{v}" for k, v in value.items()) + "}" if isinstance(value, dict) else value
        group = "variant" if name in ("fc_norm", "recurrence") else "variant.drafter"
        overrides.append(f"{group}.{name}={text}")
    if drafter.manifest.variant == "eagle3":
        if config.draft_vocab_size is not None:
            overrides.append(f"variant.draft_vocab_size={config.draft_vocab_size}")
        if not published_taps(drafter.manifest, target):
            overrides.append(f"variant.taps=[{','.join(map(str, drafter.manifest.taps))}]")
    return overrides


# ---- what it is ----------------------------------------------------------------------------------------------


def _detect(files: Checkpoint, asked: str | None) -> str:
    """``eagle``, ``eagle3`` or ``speculators``."""
    if asked is not None:
        if asked not in READABLE:
            raise ValueError(
                f"format={asked!r} is not one of {', '.join(READABLE)}; leave it out, and files for vLLM and SGLang "
                "are recognised by themselves"
            )
        return asked
    config, names = files.config, files.tensors
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        if config.get("speculators_model_type") != "eagle3":
            raise ValueError(
                f"{files.source} holds a speculators model of type {config.get('speculators_model_type')!r}; only "
                "eagle3 can be read"
            )
        return "speculators"
    architectures = config.get("architectures") or []
    known = {*layouts.FUSED_ARCHITECTURES, *layouts.FEATURE_ARCHITECTURES}
    strange = [one for one in architectures if one not in known]
    model_type = config.get("model_type", "llama")
    if strange or model_type not in ("llama", "eagle", "eagle3"):
        raise ValueError(
            f"{files.source} has the unknown architecture {', '.join(strange) or model_type}; drafters with one Llama "
            f"layer can be read. If it is one under another name, say so with format={' or format='.join(READABLE)}"
        )
    whole = [name for name in names if name.startswith("model.layers.")]
    if whole:
        raise ValueError(f"{files.source} holds a whole language model ({whole[0]}), not a drafter; give the drafter")
    is_fused = (
        any(one in layouts.FUSED_ARCHITECTURES for one in architectures)
        or "draft_vocab_size" in config
        or any(name.startswith("midlayer.") or name in MAPS for name in names)
    )
    return "eagle3" if is_fused else "eagle"


def _variant(kind: str, asked: str | None) -> str:
    fitting = ("eagle", "hass") if kind == "eagle" else ("eagle3",)
    if asked is not None and asked not in fitting:
        raise ValueError(f"variant={asked} does not have the tensors of format={kind}; use {' or '.join(fitting)}")
    return asked or fitting[0]


def _drafter_config(files: Checkpoint, kind: str, target: FrozenTarget) -> DrafterConfig:
    """The drafter's shape by its config.json, checked against the target's; taps aside."""
    raw = files.config
    layer = raw.get("transformer_layer_config", {}) if kind == "speculators" else raw
    if not isinstance(layer, dict):
        raise ValueError(f"config.json has transformer_layer_config={layer!r}; it must describe the decoder layer")
    if kind == "speculators" and layer.get("model_type", "llama") != "llama":
        raise ValueError(
            f"config.json has a decoder layer of the unknown architecture {layer['model_type']!r}; only llama layers "
            "can be read"
        )
    config = layouts.read_layer(layer)
    _check_switches(raw, kind)
    own, wide = config.hidden_size, raw.get("target_hidden_size") or config.hidden_size
    if own != target.hidden_size or wide != target.hidden_size:
        what = f"hidden_size={own}" if own != target.hidden_size else f"target_hidden_size={wide}"
        raise ValueError(
            f"{files.source} has {what}, the target {target.source} has {target.hidden_size}; a drafter is as wide as "
            "its target. Give the target that it was trained for"
        )
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"{files.source} drafts for a vocabulary of {config.vocab_size} tokens, the target {target.source} has "
            f"{target.vocab_size}. Give the target that it was trained for"
        )
    bias = raw.get("bias", kind == "eagle")
    if kind == "eagle":
        return dataclasses.replace(config, fc_bias=bool(bias))
    size = raw.get("draft_vocab_size")
    if size is not None and (not isinstance(size, int) or not 1 <= size <= config.vocab_size):
        raise ValueError(f"config.json has draft_vocab_size={size!r}; it must lie between 1 and {config.vocab_size}")
    return dataclasses.replace(
        config,
        fc_bias=bool(bias),
        draft_vocab_size=None if size == config.vocab_size else size,
        fc_norm=bool(raw.get("fc_norm")),
        recurrence="post_norm" if raw.get("norm_output") else "pre_norm",
    )


def _check_switches(raw: Mapping[str, Any], kind: str) -> None:
    """Refuse EAGLE-3 drafters that compute something else with the same tensors."""
    nested = raw.get("eagle_config") or {}
    for key in layouts.UNSUPPORTED_SWITCHES:
        if raw.get(key) or nested.get(key):
            raise ValueError(f"config.json has {key}=true; a drafter of that kind cannot be read")
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError(
            "config.json has use_aux_hidden_state=false; only drafters that read fused streams can be read"
        )
    if kind == "speculators" and "norm_before_residual" not in raw:
        raise ValueError(
            "config.json does not say norm_before_residual, and readers disagree on what that means; write true or "
            "false into it, as the drafter was trained (only false can be read)"
        )


def _taps(files: Checkpoint, target: FrozenTarget, asked: Sequence[Tap] | None) -> tuple[Tap, ...]:
    """The streams that an EAGLE-3 drafter reads, counted as the layers before them."""
    if asked is not None:
        return validate_taps(asked, target.num_layers)
    outer = files.config.get("eagle_aux_hidden_state_layer_ids")
    inner = (files.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    for listed in (outer, inner):
        if listed is not None and not (isinstance(listed, list) and all(type(tap) is int for tap in listed)):
            raise ValueError(
                f"config.json has eagle_aux_hidden_state_layer_ids={listed!r}; it must be a list of layers"
            )
    if outer:
        taps = validate_taps(outer, target.num_layers)
        if list(outer) != sorted(outer):
            raise ValueError(
                f"config.json lists the streams {outer} out of order, and vLLM concatenates them in ascending order "
                "all the same; say in which order the drafter was trained with taps="
            )
        return taps
    default = default_taps(target.num_layers)
    if not inner or list(default) in (inner, [tap + 1 for tap in inner]):
        return default
    raise ValueError(
        f"config.json lists layers {inner} inside eagle_config, which vLLM reads as those streams and SGLang as the "
        f"next ones; say which with taps={inner} or taps={[tap + 1 for tap in inner]}"
    )


# ---- its tensors ---------------------------------------------------------------------------------------------


def _weights(files: Checkpoint, tensors: dict[str, Tensor], network: DraftNetwork, kind: str) -> dict[str, Tensor]:
    """The network's state from the file's tensors, by name and shape; floating ones in fp32."""
    expected = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    identity = network.config.draft_vocab_size is None and kind != "eagle"
    if identity:
        tensors = _without_identity_maps(tensors, network.config.vocab_size)

    def shown(names: set[str]) -> str:
        nested = any(name.startswith("layers.0.") for name in files.tensors)
        found = [layouts.file_name(name, nested) for name in sorted(names)]
        return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")

    if missing := set(expected) - set(tensors):
        hint = ""
        if "lm_head.weight" in missing:
            hint = "; an EAGLE-3 drafter brings its own head, it is not the target's"
        elif FC_BIAS in missing:
            hint = "; if it was trained without one, write bias: false into config.json"
        elif missing & set(MAPS):
            hint = "; a head over a draft vocabulary is useless without the map that it was trained with"
        raise ValueError(f"{files.source} lacks {shown(missing)}{hint}")
    if extra := set(tensors) - set(expected):
        hint = "; if it was trained with one, write bias: true into config.json" if FC_BIAS in extra else ""
        raise ValueError(f"{files.source} holds {shown(extra)}, which a drafter of format={kind} does not have{hint}")
    weights = {}
    for name in expected:
        value = tensors[name]
        if tuple(value.shape) != expected[name]:
            raise ValueError(
                f"{files.source}: {shown({name})} has shape {tuple(value.shape)}, config.json asks for "
                f"{expected[name]}{_shape_hint(name, value, network.config)}"
            )
        weights[name] = _plain_tensor(files.source, shown({name}), name, value)
    return weights


def _shape_hint(name: str, value: Tensor, config: DrafterConfig) -> str:
    if name == "fc.weight" and value.dim() == 2:
        columns = value.shape[1] / config.hidden_size
        if columns == 3 and config.num_taps == 1:
            return "; it fuses three streams as EAGLE-3 does, so this is no EAGLE-1 file: check config.json"
        if columns == 2 and config.num_taps > 1:
            return "; it fuses embedding and feature as EAGLE-1 does, so this is no EAGLE-3 file: check config.json"
    return ""


def _plain_tensor(source: str, shown: str, name: str, value: Tensor) -> Tensor:
    if name in MAPS:
        if value.is_floating_point() or value.is_complex():
            raise ValueError(f"{source}: {shown} is {value.dtype}; a vocabulary map holds whole numbers")
        return value.to(torch.bool if name == "t2d" else torch.int64)
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{source}: {shown} is {value.dtype}; quantised drafters cannot be read, give the full one")
    value = value.float()
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{source}: {shown} holds NaN or infinite values; the file is broken, get it again")
    return value.contiguous()


def _without_identity_maps(tensors: dict[str, Tensor], V: int) -> dict[str, Tensor]:
    """A whole vocabulary needs no maps; some writers store them all the same."""
    d2t, t2d = (tensors.get(name) for name in MAPS)
    if (d2t is not None and (d2t.shape != (V,) or bool(d2t.any()))) or (t2d is not None and not bool(t2d.all())):
        raise ValueError(
            "d2t or t2d leaves tokens out, but config.json says that the draft vocabulary is the target's; correct "
            "draft_vocab_size"
        )
    return {name: value for name, value in tensors.items() if name not in MAPS}


def _check_maps(weights: dict[str, Tensor], config: DrafterConfig) -> None:
    """``nonzero(t2d)`` must be ``arange(K) + d2t``."""
    if config.draft_vocab_size is None:
        return
    d2t_K, inside_K = weights["d2t"], weights["t2d"].nonzero().flatten()
    index_K = torch.arange(config.draft_vocab_size)
    if inside_K.equal(index_K + d2t_K):
        return
    if inside_K.equal(d2t_K):
        raise ValueError(
            "d2t holds absolute target ids where the formats store offsets, so every draft token would be another one; "
            "subtract arange(draft_vocab_size) from it in the file"
        )
    raise ValueError(
        "d2t and t2d disagree: nonzero(t2d) is not arange(draft_vocab_size) + d2t. One of them belongs to another "
        "head; get both maps that were trained with this one"
    )


def _check_embedding(embedding: Tensor | None, target: FrozenTarget, trusted: tuple[str, ...]) -> str:
    """Compare the file's embedding with the target's; a drafter here always reads the target's."""
    table_Vd = embedding_table(target).float()
    if embedding is None:
        if not shares_embedding(target, table_Vd.to(target.dtype)) and "embedding" not in trusted:
            raise ValueError(
                f"target {target.source} scales its embedding and the drafter's file has none, so it is open which one "
                "it was trained with; say trust=embedding if it was the scaled one"
            )
        return "embedding: none in the file, the target's is used"
    if embedding.shape != table_Vd.shape:
        raise ValueError(
            f"{EMBEDDING} has shape {tuple(embedding.shape)}, the target's embedding {tuple(table_Vd.shape)}. Give the "
            "target that it was trained for"
        )
    difference_Vd = (embedding.float() - table_Vd).abs()
    rounding_Vd = 2**-8 * table_Vd.abs() + 1e-7  # either side may have been stored as bfloat16 or float16
    off = int((difference_Vd > rounding_Vd).any(-1).sum())
    if not off and bool(torch.isfinite(difference_Vd).all()):
        return "embedding: equal to the target's" + (", to rounding" if bool(difference_Vd.any()) else "")
    told = (
        f"{off} of {len(table_Vd)} rows of {EMBEDDING} differ from the target's (by up to "
        f"{float(difference_Vd.max()):.2g})"
    )
    if "embedding" not in trusted:
        raise ValueError(
            f"{told}: it was trained with another target or embedding. Give that target, or say trust=embedding to go "
            "on with this target's embedding"
        )
    return f"embedding: {told}; the target's is used, as trust=embedding said"


# ---- its manifest --------------------------------------------------------------------------------------------


def _manifest(
    config: DrafterConfig,
    variant: str,
    taps: tuple[Tap, ...],
    weights: dict[str, Tensor],
    target: FrozenTarget,
    kind: str,
) -> FeatureManifest:
    """What the files and the target tell; facts of the training are unknown."""
    digest = None
    if config.draft_vocab_size is not None:
        ids_K = weights["d2t"] + torch.arange(config.draft_vocab_size)
        digest = DraftVocabulary(ids_K, config.vocab_size).digest
    return dataclasses.replace(
        feature_manifest(target, taps),
        dtype_policy={"drafter": "unknown", "softmax": "unknown", "loss": "unknown"},
        drafter=config.to_dict(),
        draft_vocabulary=digest,
        variant=variant,
        switches={"imported_from": kind, "target_revision": "unknown", "supervise": "unknown", "objective": "unknown"},
    )


def _ours(
    files: Checkpoint,
    found: FeatureManifest,
    weights: dict[str, Tensor],
    target: FrozenTarget,
    trusted: tuple[str, ...],
    variant: str | None,
) -> tuple[FeatureManifest, dict[str, Tensor], dict[str, Any]]:
    """Take up the manifest that our own export brought, after comparing it with the files and the target.

    Raises:
        ManifestMismatch: another target (``trust=target`` goes on), or files that were changed since.
    """
    record = files.record or {}
    if record.get("record") != RECORD_FORMAT or not isinstance(record.get("manifest"), dict):
        raise ValueError(
            f"{files.source}/eaglelab.json is not of a form that this version reads; upgrade eaglelab, or remove the "
            "file to import the rest as a foreign drafter"
        )
    saved = FeatureManifest.from_dict(record["manifest"], f"{files.source}/eaglelab.json")
    saved = dataclasses.replace(saved, drafter=DrafterConfig(**saved.drafter).to_dict())
    bias = saved.drafter["fc_bias"]
    if FC_BIAS in weights and not bias and not bool(weights[FC_BIAS].any()):
        weights = {name: value for name, value in weights.items() if name != FC_BIAS}  # zeros that SGLang asks for
    elif FC_BIAS not in weights and bias:
        weights = weights | {FC_BIAS: torch.zeros(found.drafter["hidden_size"])}  # zeros that vLLM refuses
    found = dataclasses.replace(found, drafter=dict(found.drafter) | {"fc_bias": FC_BIAS in weights})
    saved.require_same(
        found,
        [field for field in WEIGHT_FIELDS if field != "target"],
        f"{files.source} was changed after its export",
    )
    if "target" not in trusted:
        saved.require_same(
            found, ("target",), f"{files.source} was trained for another target (trust=target goes on all the same)"
        )
    kept = dataclasses.replace(
        saved, target=found.target, head=found.head, embedding=found.embedding, variant=variant or saved.variant
    )
    metrics = record.get("metrics")
    return kept, weights, metrics if isinstance(metrics, dict) else {}


def _require_trust(embedding_checked: bool, target: FrozenTarget, trusted: tuple[str, ...]) -> str:
    if embedding_checked and "embedding" not in trusted:
        return "target: its embedding, widths and vocabulary fit; which revision the drafter was trained on is unknown"
    if "target" not in trusted:
        raise ValueError(
            f"nothing in the files tells which target the drafter was trained for; widths and vocabulary fit "
            f"{target.source}, the rest cannot be checked. Say trust=target if you know that it is the one"
        )
    return "target: widths and vocabulary fit; taken on trust, as trust=target said"
