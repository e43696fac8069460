"""What a published drafter is: its format, shape and streams, by its config.json and the names of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from eaglelab.drafters import DrafterConfig
from eaglelab.formats import layouts
from eaglelab.formats.files import Checkpoint
from eaglelab.formats.layouts import MAPS
from eaglelab.target import FrozenTarget, Tap, default_taps, validate_taps

READABLE = ("eagle", "eagle3", "speculators")
"""Formats to read; the files for vLLM and SGLang are spellings of the first two."""


def detect(files: Checkpoint, asked: str | None) -> str:
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


def variant_of(kind: str, asked: str | None) -> str:
    fitting = ("eagle", "hass") if kind == "eagle" else ("eagle3",)
    if asked is not None and asked not in fitting:
        raise ValueError(f"variant={asked} does not have the tensors of format={kind}; use {' or '.join(fitting)}")
    return asked or fitting[0]


def drafter_config(files: Checkpoint, kind: str, target: FrozenTarget) -> DrafterConfig:
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


def taps_of(files: Checkpoint, target: FrozenTarget, asked: Sequence[Tap] | None) -> tuple[Tap, ...]:
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
