"""The shape of a drafter: a Llama-style decoder layer as wide as its target."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from transformers import LlamaConfig, PretrainedConfig

# Rotary laws whose angles do not depend on the length of the sequence at hand.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

Recurrence = Literal["pre_norm", "post_norm"]


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Everything that decides a drafter's tensors and positions. Plain values, so that it travels as JSON.

    Attributes:
        hidden_size: width d, the target's.
        vocab_size: target vocabulary V.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size: layer shape.
        rms_norm_eps: of every norm.
        rope_parameters: base and scaling law in the transformers form; the target's base unless said
            otherwise, and the one used everywhere (training, drafting, export).
        max_position_embeddings: the last legal position + 1.
        fc_bias: bias of the fusion projection (published EAGLE-1: yes; some servers ignore it: say no).
        num_taps: target streams per row, concatenated (EAGLE-1 and HASS read 1, EAGLE-3 reads 3).
        draft_vocab_size: tokens that the drafter's own head can propose; None: no own head, or all of them.
        fc_norm: an RMSNorm on each tap before the fusion (EAGLE-3.1; ``fc_norm`` in published configs).
        recurrence: which output of the fused layer is the next state: ``pre_norm``, before the final norm (EAGLE-3),
            or ``post_norm``, after it (EAGLE-3.1; ``norm_output`` in published configs). The head reads it after the
            norm either way.
    """

    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    fc_bias: bool = True
    num_taps: int = 1
    draft_vocab_size: int | None = None
    fc_norm: bool = False
    recurrence: Recurrence = "pre_norm"

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter: {name}={getattr(self, name)} is below 1; set variant.drafter.{name}")
        if not isinstance(self.rope_parameters, dict):
            raise ValueError(
                f"drafter: rope_parameters={self.rope_parameters} is not of the form {{rope_type: default, rope_theta: "
                "10000.0}; set variant.drafter.rope_parameters"
            )
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(
                f"drafter: num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}; "
                "set both under variant.drafter"
            )
        if self.recurrence not in get_args(Recurrence):
            raise ValueError(f"variant.recurrence={self.recurrence!r} is not one of {', '.join(get_args(Recurrence))}")
        rope_type = self.rope_parameters.get("rope_type", "default")
        if rope_type not in STATIC_ROPE_TYPES:
            raise ValueError(
                f"drafter: rope_type={rope_type!r} is not one of {', '.join(STATIC_ROPE_TYPES)}; "
                "set variant.drafter.rope_parameters"
            )

    @classmethod
    def from_target(cls, target: PretrainedConfig, **overrides: Any) -> DrafterConfig:
        """The default drafter for a target: same width, heads, MLP and rotary law.

        Args:
            target: the text config of any causal LM. Fields that its family lacks get Llama's usual values
                (no grouped heads: as many as attention heads; GPT-2's MLP: 4 d; learned positions: base
                10000). Rotary laws that depend on the running length are replaced by their plain base.
            overrides: any field of this class; ``None`` keeps the default.

        Raises:
            ValueError: unknown or inconsistent field.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(overrides) - fields):
            raise ValueError(f"drafter: unknown field {unknown[0]!r}; known: {', '.join(sorted(fields))}")
        d, heads = target.hidden_size, target.num_attention_heads
        rope = getattr(target, "rope_parameters", None) or {}
        rope = dict(rope.get("full_attention", rope))
        rope.pop("partial_rotary_factor", None)
        if rope.get("rope_type", "default") not in STATIC_ROPE_TYPES:
            rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
        defaults: dict[str, Any] = {
            "hidden_size": d,
            "vocab_size": target.vocab_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
            "head_dim": getattr(target, "head_dim", None) or d // heads,
            "intermediate_size": getattr(target, "intermediate_size", None) or 4 * d,
            "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-5),
            "rope_parameters": rope or {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": target.max_position_embeddings,
        }
        return cls(**defaults | {k: v for k, v in overrides.items() if v is not None})

    def to_llama(self) -> LlamaConfig:
        """The same layer as a transformers config (rotary tables, checkpoint files)."""
        values = self.to_dict()
        for own in ("fc_bias", "num_taps", "draft_vocab_size", "fc_norm", "recurrence"):
            values.pop(own)
        return LlamaConfig(num_hidden_layers=1, **values)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``DrafterConfig(**d)`` restores it."""
        return dataclasses.asdict(self)
