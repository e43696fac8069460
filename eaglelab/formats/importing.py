"""In: a published drafter becomes a run folder, or one clear line says why not.

Letters: d hidden width, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglelab.data.draft_vocabulary import DraftVocabulary
from eaglelab.drafters import DrafterConfig, DraftNetwork
from eaglelab.features.manifest import feature_manifest
from eaglelab.formats import layouts
from eaglelab.formats.exporting import RECORD_FORMAT, published_taps
from eaglelab.formats.files import Checkpoint, read_checkpoint_folder, whole_folder
from eaglelab.formats.layouts import EMBEDDING, FC_BIAS
from eaglelab.formats.recognising import detect, drafter_config, taps_of, variant_of
from eaglelab.formats.tensors import check_embedding, check_maps, network_weights
from eaglelab.target import FeatureManifest, FrozenTarget, Tap
from eaglelab.training.run_folder import RunFolder
from eaglelab.variants import VARIANTS
from eaglelab.variants.manifest import WEIGHT_FIELDS

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
        format: one of :data:`~eaglelab.formats.recognising.READABLE`; None: as the files say.
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
    kind = detect(files, format)
    fused = kind != "eagle"
    config = drafter_config(files, kind, target)
    streams = taps_of(files, target, taps) if fused else ("final",)
    config = dataclasses.replace(config, num_taps=len(streams))
    tensors = {layouts.network_name(name, fused): value for name, value in files.tensors.items()}
    if len(tensors) < len(files.tensors):
        raise ValueError(f"{files.source} holds the decoder layer twice, as midlayer.* and layers.0.*; keep one")
    embedding = tensors.pop(EMBEDDING, None)
    name = variant_of(kind, variant)
    network = VARIANTS[name].build_network(config)
    weights = network_weights(files, tensors, network, kind)
    check_maps(weights, config)
    notes = [check_embedding(embedding, target, trusted)]
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
