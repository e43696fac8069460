"""Finding and running the decoder stack of any causal LM: layers, taps, cache argument.

Letters: B batch, S tokens, d hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from eaglelab.target.kv import KVSlots
from eaglelab.target.taps import FINAL, Tap

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


@dataclass(frozen=True)
class Wiring:
    """The parts of a causal LM that the wrapper calls, and the way it calls them."""

    decoder: nn.Module
    layers: Sequence[nn.Module]
    embedding: nn.Embedding
    head: nn.Linear
    cache_argument: str  # "cache"; "past_key_values" in older library versions and own code
    norm: nn.Module | None  # behind the last layer; None where its name is unknown

    def run(self, tokens_BS: Tensor, position_BS: Tensor, mask: Any, cache: Cache | None) -> Tensor:
        """The decoder stack alone: final features [B, S, d], in the target's own type even inside
        a caller's autocast."""
        arguments: dict[str, Any] = {"use_cache": False}
        if cache is not None:
            arguments = {"use_cache": True, self.cache_argument: cache}
        kind = tokens_BS.device.type
        mixed = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if mixed else nullcontext():
            output = self.decoder(input_ids=tokens_BS, attention_mask=mask, position_ids=position_BS, **arguments)
        final_BSd: Tensor = output.last_hidden_state
        return final_BSd

    def rows(
        self, tokens_BN: Tensor, position_BN: Tensor, mask: Any, cache: KVSlots, taps: Sequence[Tap]
    ) -> tuple[Tensor, dict[Tap, Tensor]]:
        """`run` and its taps in one function without hooks, which `torch.compile` can capture."""
        arguments: dict[str, Any] = {"use_cache": True, self.cache_argument: cache}
        inner = [int(tap) for tap in taps if tap != FINAL]
        output = self.decoder(
            input_ids=tokens_BN,
            attention_mask=mask,
            position_ids=position_BN,
            output_hidden_states=bool(inner),
            **arguments,
        )
        return output.last_hidden_state, {tap: output.hidden_states[tap] for tap in inner}

    @contextmanager
    def tapping(self, taps: Sequence[Tap]) -> Iterator[dict[Tap, Tensor]]:
        """Hooks on the tapped layers for the time of one forward pass; nothing else is kept."""
        tapped: dict[Tap, Tensor] = {}
        handles = []

        def keep(tap: Tap) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                tapped[tap] = args[0] if args else kwargs["hidden_states"]

            return hook

        try:
            for tap in taps:
                if tap != FINAL:
                    layer = self.layers[int(tap)]
                    handles.append(layer.register_forward_pre_hook(keep(tap), with_kwargs=True))
            yield tapped
        finally:
            for handle in handles:
                handle.remove()


def find_wiring(model: Any) -> Wiring:
    """Locate decoder, layers, embedding and head.

    Raises:
        ValueError: the model is no decoder with a linear head, or takes no position ids.
    """
    name = type(model).__name__
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        raise ValueError(
            f"{name} is no causal language model with a token embedding and a linear head. "
            "Give a checkpoint that AutoModelForCausalLM loads, such as a Llama or Qwen model."
        )
    decoder = model.get_decoder()
    if decoder is model:
        decoder = model.base_model
    config = model.config.get_text_config()
    parameters = inspect.signature(decoder.forward).parameters
    cache_argument = next((n for n in ("cache", "past_key_values") if n in parameters), None)
    if cache_argument is None or "position_ids" not in parameters:
        raise ValueError(
            f"{name}: its decoder takes no position ids or no key/value cache, so packed segments "
            "and draft trees cannot be addressed. Choose a target with rotary or learned "
            "positions that accepts position_ids (Llama, Qwen, Mistral, Gemma, Phi, GPT-2 ...)."
        )
    stacks = [
        child
        for child in decoder.children()
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers
    ]
    if not stacks:
        raise ValueError(
            f"{name}: no list of {config.num_hidden_layers} decoder layers found in its decoder, "
            "so there is nothing to tap. Choose a decoder-only target."
        )
    norm = next((child for child_name, child in decoder.named_children() if child_name in FINAL_NORMS), None)
    return Wiring(decoder, list(stacks[0]), embedding, head, cache_argument, norm)


def use_exact_attention(model: Any) -> None:
    """Choose kernels that take a floating 4-D mask: sdpa, or eager where a softcap acts on scores.

    Raises:
        ValueError: the model was loaded with another kernel, such as flash attention.
    """
    config = model.config.get_text_config()
    used = config._attn_implementation
    if getattr(config, "attn_logit_softcapping", None) is not None:
        if used != "eager":
            model.set_attn_implementation("eager")
    elif used not in ("sdpa", "eager"):
        raise ValueError(
            f"attention implementation {used!r} takes no floating 4-D mask, which packed segments "
            'and draft trees need. Load the target with attn_implementation="sdpa".'
        )
