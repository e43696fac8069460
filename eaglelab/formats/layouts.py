"""The published formats: which drafters they hold, their tensors' names and their config.json.

Letters: d hidden width, V target vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from transformers import LlamaConfig

from eaglelab.drafters import DrafterConfig
from eaglelab.target import Tap

EMBEDDING = "embed_tokens.weight"
FC_BIAS = "fc.bias"
MAPS = ("d2t", "t2d")

FUSED_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
FEATURE_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")

# Switches of some EAGLE-3 drafters that make the tensors compute something else than ours do.
UNSUPPORTED_SWITCHES = ("norm_before_residual", "norm_before_fc", "use_aux_norm")

_LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
# What config.json can say of a drafter. A field of DrafterConfig that is not here cannot be exported.
_SAID = {
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "fc_bias",
    "num_taps",
    "draft_vocab_size",
}
_SAID_BY_SERVERS = {"fc_norm", "recurrence"}  # of EAGLE-3.1


@dataclasses.dataclass(frozen=True)
class Format:
    """What a format can hold.

    Attributes:
        variants: those whose drafters fit.
        embedding: the file carries the token embedding; otherwise the client takes the target's.
        bias: of ``fc`` in EAGLE-1 drafters: written as trained, never, or always (zeros then). No format has one for
            EAGLE-3.
        custom_taps: other streams than 2, L // 2 and L - 3 can be named.
        norms: EAGLE-3.1's ``fc_norm`` and ``norm_output`` can be said.
        client: who reads it.
    """

    variants: tuple[str, ...]
    embedding: bool
    bias: Literal["as trained", "never", "always"]
    custom_taps: bool
    norms: bool
    client: str


_FEATURE, _FUSED = ("eagle", "hass"), ("eagle3",)

FORMATS: dict[str, Format] = {
    "eagle": Format(_FEATURE, True, "as trained", False, False, "SafeAILab EAGLE-1 and HASS"),
    "eagle3": Format(_FUSED, False, "never", False, False, "SafeAILab EAGLE-3, SpecForge"),
    "speculators": Format(_FUSED, True, "never", True, True, "speculators, vLLM"),
    "vllm": Format(_FEATURE + _FUSED, False, "never", True, True, "vLLM"),
    "sglang": Format(_FEATURE + _FUSED, False, "always", True, True, "SGLang"),
}

SAFEAILAB = ("eagle", "eagle3")
"""Formats whose readers bring an attention of their own."""


def format_for(name: str, variant: str) -> Format:
    """Raises ValueError for an unknown format, or one that cannot hold the variant."""
    fitting = [one for one, known in FORMATS.items() if variant in known.variants]
    if name not in FORMATS:
        raise ValueError(f"format={name!r} is not one of {', '.join(FORMATS)}; for {variant}: {', '.join(fitting)}")
    if variant not in FORMATS[name].variants:
        raise ValueError(f"format={name} cannot hold a drafter of variant {variant}; use {' or '.join(fitting)}")
    return FORMATS[name]


def file_name(tensor: str, nested: bool) -> str:
    """The network's tensor name -> the file's; speculators calls the one decoder layer ``layers.0``."""
    return tensor.replace("midlayer.", "layers.0.", 1) if nested else tensor


def network_name(tensor: str, fused: bool) -> str:
    """The file's tensor name -> the network's; EAGLE-3 files say ``midlayer`` or ``layers.0``."""
    return tensor.replace("layers.0.", "midlayer.", 1) if fused and tensor.startswith("layers.0.") else tensor


# ---- reading config.json -------------------------------------------------------------------------------------


def read_layer(raw: Mapping[str, Any]) -> DrafterConfig:
    """The decoder layer that config.json describes, old and new key spellings alike; bias, taps, vocabulary aside.

    Raises:
        ValueError: a key is missing or unusable, or describes another kind of layer.
    """
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(raw.get(key), int):
            raise ValueError(f"config.json has {key}={raw.get(key)!r}; a drafter's config gives it as a number")
    if raw.get("num_hidden_layers", 1) != 1:
        raise ValueError(
            f"config.json has num_hidden_layers={raw['num_hidden_layers']}; only drafters of one decoder layer are read"
        )
    kept = {key: raw[key] for key in _LAYER_KEYS if raw.get(key) is not None}
    kept |= {key: dict(kept[key]) for key in ("rope_scaling", "rope_parameters") if isinstance(kept.get(key), dict)}
    try:
        layer = LlamaConfig(num_hidden_layers=1, **kept)
    except Exception as error:  # the library's validators raise types of their own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"config.json does not describe a Llama decoder layer: {reason}") from error
    if layer.hidden_act != "silu":
        raise ValueError(f"config.json has hidden_act={layer.hidden_act!r}; the drafters here use silu only")
    rope: dict[str, Any] = {key: value for key, value in (layer.rope_parameters or {}).items() if key != "type"}
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json rotates a part of each head only (partial_rotary_factor); not supported here")
    rope["rope_theta"] = float(rope.get("rope_theta", 10000.0))
    return DrafterConfig(
        hidden_size=layer.hidden_size,
        vocab_size=layer.vocab_size,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads or layer.num_attention_heads,
        head_dim=layer.head_dim or layer.hidden_size // layer.num_attention_heads,
        intermediate_size=layer.intermediate_size,
        rms_norm_eps=layer.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=layer.max_position_embeddings,
    )


# ---- writing config.json -------------------------------------------------------------------------------------


def require_sayable(config: DrafterConfig, shape: Format, name: str) -> None:
    """Refuse a drafter with a property that no key of the formats stands for.

    Raises:
        ValueError: names the property.
    """
    said = _SAID | _SAID_BY_SERVERS if shape.norms else _SAID
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in said and value != field.default:
            raise ValueError(
                f"format={name} has no key for the drafter's {field.name}={value!r}, and a reader would compute "
                f"something else; a drafter with {field.name}={field.default!r} fits"
            )


def require_readable_positions(config: DrafterConfig, name: str) -> None:
    """Refuse what SafeAILab's own attention would compute differently; servers read any law and head width.

    Raises:
        ValueError: scaled RoPE other than linear at base 10000, or (EAGLE-1) heads that are not d / H wide.
    """
    if name not in SAFEAILAB:
        return
    rope = config.rope_parameters
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta", 10000.0)
    if kind != "default" and not (kind == "linear" and theta == 10000.0):
        raise ValueError(
            f"readers of format={name} scale RoPE linearly and at base 10000 only, this drafter has rope_type={kind} "
            f"at {theta:g}; use format=vllm or format=sglang, or train with variant.drafter.rope_parameters of its own"
        )
    if name == "eagle" and config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"readers of format={name} take hidden_size / num_attention_heads as the width of a head, this drafter has "
            f"head_dim={config.head_dim}; use format=vllm or format=sglang"
        )


def layer_keys(config: DrafterConfig, name: str, dtype: str) -> dict[str, Any]:
    """Llama keys of the decoder layer; RoPE and dtype in the spelling of transformers 4 and of 5."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if name in SAFEAILAB and "factor" in scaling:
        scaling = {"type": "linear", "factor": float(scaling["factor"])}  # exactly these two keys are let through
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default"} | rope,
        "rope_scaling": scaling if "factor" in scaling else None,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def feature_keys(config: DrafterConfig, name: str, dtype: str, bias: bool) -> dict[str, Any]:
    """config.json of an EAGLE-1 or HASS drafter.

    ``bias`` is written only when false: absent means true for ``fc``, and a written true would make vLLM and SGLang
    give the *attention* biases, which no file has.
    """
    architecture = "LlamaForCausalLMEagle" if name == "sglang" else "LlamaForCausalLM"
    keys = {"architectures": [architecture], **layer_keys(config, name, dtype)}
    return keys if bias else keys | {"bias": False}


def fused_keys(config: DrafterConfig, name: str, dtype: str, taps: tuple[Tap, ...], published: bool) -> dict[str, Any]:
    """config.json of an EAGLE-3 drafter, flat form.

    vLLM counts a tap as the layers before it, SGLang's nested list as the layer whose output it is (one less). The
    published taps are left to SGLang's own default.
    """
    keys: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bias": False,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "norm_before_residual": False,
        **layer_keys(config, name, dtype),
    }
    if FORMATS[name].norms:
        keys |= norm_keys(config)
    if len(taps) != 3:
        keys["num_aux_hidden_states"] = len(taps)
    if name == "vllm" or (name == "sglang" and not published):
        keys["eagle_aux_hidden_state_layer_ids"] = list(taps)
    if name == "sglang" and not published:
        keys["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [int(tap) - 1 for tap in taps]}
    return keys


def norm_keys(config: DrafterConfig) -> dict[str, bool]:
    """EAGLE-3.1's switches: a norm on each stream before ``fc``, and the normed state fed back."""
    return {"fc_norm": config.fc_norm, "norm_output": config.recurrence == "post_norm"}


def speculators_keys(
    config: DrafterConfig, dtype: str, taps: tuple[Tap, ...], verifier: str, architectures: list[str], draft_tokens: int
) -> dict[str, Any]:
    """config.json of speculators. No top-level ``model_type``, and every switch written out: readers disagree on
    what an absent ``norm_before_residual`` means."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_tokens, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "embed_requires_grad": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        **norm_keys(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": architectures, "name_or_path": verifier},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": layer_keys(config, "speculators", dtype),
    }
