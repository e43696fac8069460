"""What a target is made of, known from its config alone: no weight is read or allocated.

The model is built on the meta device, so that every family counts as its own code says. Estimates of memory and of
work start from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from eaglelab import assets
from eaglelab.target.decoder import find_wiring
from eaglelab.target.experts import count_experts, is_expert_block
from eaglelab.target.loading import cause_of, load_tokenizer, locate
from eaglelab.target.masks import MaskRule


@dataclass(frozen=True)
class TargetShape:
    """Counts are numbers of parameters.

    Attributes:
        config: the text config.
        hidden_size, num_layers, vocab_size: d, L and the head's V.
        parameters: all, a tied head once.
        embedding, head: the embedding's table (position vectors included); the head's, 0 where it is tied to it.
        layer: the largest decoder layer.
        active: weights that one token is multiplied with in the decoder layers (of a mixture of experts the routed
            share).
        attention_width: query heads times their width.
        dense_attention: the family writes its attention scores out (eager kernels), so that memory is quadratic in
            the length.
    """

    config: PretrainedConfig
    hidden_size: int
    num_layers: int
    vocab_size: int
    parameters: int
    embedding: int
    head: int
    layer: int
    active: int
    attention_width: int
    dense_attention: bool = False

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP of one token."""
        return getattr(self.config, "intermediate_size", None) or 4 * self.hidden_size

    @property
    def key_value_width(self) -> int:
        """Key heads times their width."""
        heads = self.config.num_attention_heads
        return self.attention_width // heads * (getattr(self.config, "num_key_value_heads", None) or heads)

    @classmethod
    def of_config(cls, config: PretrainedConfig, *, trust_remote_code: bool = False) -> TargetShape:
        """The shape of the causal LM that ``config`` describes.

        Raises:
            ValueError: no causal LM that can be a target.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return cls.of_model(model)

    @classmethod
    def of_model(cls, model: Any) -> TargetShape:
        """The shape of a causal LM on any device, the meta device included."""
        wiring = find_wiring(model)
        config = model.config.get_text_config()
        MaskRule.from_config(config)  # refuses what cannot be a target
        heads = config.num_attention_heads
        layers = [_count(layer.parameters()) for layer in wiring.layers]
        everything = _count(model.parameters())
        tied = wiring.head.weight is wiring.embedding.weight
        head = 0 if tied else _count(wiring.head.parameters())
        return cls(
            config=config,
            hidden_size=int(wiring.head.in_features),
            num_layers=len(layers),
            vocab_size=int(wiring.head.out_features),
            parameters=everything,
            embedding=everything - sum(layers) - head,
            head=head,
            layer=max(layers),
            active=sum(round(_active(layer, config)) for layer in wiring.layers),
            attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
            dense_attention=config._attn_implementation == "eager"
            or getattr(config, "attn_logit_softcapping", None) is not None,
        )


def read_description(
    source: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> tuple[PretrainedConfig, Any]:
    """Config and tokenizer (None if there is none) of a target: folder, hub id, ``.gguf`` file or ``"bundled"``.

    Raises:
        ValueError: nothing there, or no config in it.
    """
    from transformers import AutoConfig

    place = locate(assets.bundled_target() if source == "bundled" else source, revision, gguf_file)
    settings = {
        "revision": place.revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": place.offline,
        "gguf_file": place.gguf_file,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(place.name, **settings)
    except Exception as error:
        raise ValueError(f"the config of target {source} cannot be read: {cause_of(error)}") from error
    return config, load_tokenizer(place, settings)


def _active(layer: nn.Module, config: Any) -> float:
    """Weights of a decoder layer that one token is multiplied with."""
    routed = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_top_k", None) or 1
    total = 0.0
    experts: set[nn.Module] = set()
    for module in layer.modules():
        if is_expert_block(module):
            routed_to = module.get_submodule("experts")
            experts |= set(routed_to.modules())
            total += _matrices(routed_to.parameters()) * min(1.0, routed / count_experts(module))
    for module in layer.modules():
        if module not in experts:
            total += _matrices(module.parameters(recurse=False))
    return total


def _matrices(parameters: Iterator[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p.ndim >= 2)


def _count(parameters: Iterator[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
