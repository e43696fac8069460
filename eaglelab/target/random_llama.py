"""Llamas of a given shape with random weights, for measuring what does not depend on what they say."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

EMBEDDING = 16.0
"""Root mean square of each row of a counting target's embedding: more than all of its layers add."""
HEAD = 0.02
"""Of each row of its head, as of its other weights."""


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """Of a Llama.

    Attributes:
        num_kv_heads: heads of keys and values, which the query heads share evenly.
        tied: the head is the embedding.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name != "tied" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"shape.{name}={value} must be at least 1, a whole number")
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"shape.num_heads={self.num_heads} does not cut shape.hidden_size={self.hidden_size} into heads of "
                "even width; change one of them"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"shape.num_kv_heads={self.num_kv_heads} heads of keys cannot be shared by "
                f"shape.num_heads={self.num_heads} evenly; change one of them"
            )

    def config(self, positions: int) -> Any:
        """A transformers config with that many positions."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=positions,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
        )

    def build(self, *, positions: int, dtype: torch.dtype, device: str = "cpu") -> Any:
        """A model with weights that are drawn on the device, in their own number type; the same at every call."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(self.config(positions), dtype=dtype)

    def build_counting(self, *, positions: int, dtype: torch.dtype, device: str = "cpu") -> Any:
        """A model that says one more than the last token, 0 after the last of its vocabulary.

        It costs what any other of its shape does, but the most likely token is far ahead of the others: rounding, which
        in half precision differs between a row that is decoded alone and the same row in a tree, does not decide it, as
        it would with weights that are all drawn alike. Row t + 1 of the head is row t of the embedding, which the
        layers hardly change.

        Raises:
            ValueError: ``tied``, where the head cannot differ from the embedding.
        """
        if self.tied:
            raise ValueError("a target whose head is its embedding repeats its last token; give it a head of its own")
        model = self.build(positions=positions, dtype=dtype, device=device)
        with torch.no_grad():
            embedding_Vd = model.get_input_embeddings().weight
            embedding_Vd.div_(embedding_Vd.norm(dim=1, keepdim=True) / (EMBEDDING * self.hidden_size**0.5))
            model.get_output_embeddings().weight.copy_(embedding_Vd.roll(1, 0).mul_(HEAD / EMBEDDING))
        return model
