"""Attention masks: from "who may see whom" to what a Hugging Face decoder takes.

Letters: B batch, Q query rows, K key slots.

The library passes a ready 4-D mask through to its attention kernels. Two details decide whether
the result is right: the mask must be *additive and floating* (the eager kernel adds a boolean mask
as zeros and ones), and models that mix layer kinds take one mask per kind, in which a sliding
window or a chunk limits the distance between *positions*, never between slots: in a tree, two
neighbouring slots can be siblings at one position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class MaskRule:
    """The attention kinds of one decoder.

    ``kinds`` are the layer kinds in use. ``keyed`` says that the decoder takes a dict of masks
    keyed by kind; otherwise ``kinds`` has one entry and the decoder takes that mask alone.
    """

    kinds: tuple[str, ...]
    keyed: bool
    sliding_window: int | None = None
    chunk_size: int | None = None

    @property
    def by_position(self) -> bool:
        """True if some layers limit what a row sees by position."""
        return self.kinds != (FULL,)

    @classmethod
    def from_config(cls, text_config: Any) -> MaskRule:
        """Read the rule from a text config, by the same convention as the library's ``generate``.

        Raises:
            ValueError: a layer is of a kind that no mask describes (recurrent or compressed
                state), or attention is not causal.
        """
        name = getattr(text_config, "model_type", "the model")
        if not getattr(text_config, "is_causal", True) or getattr(text_config, "use_bidirectional_attention", False):
            raise ValueError(
                f"{name}: attention is bidirectional, so this is no causal language model. "
                "Choose a decoder-only target."
            )
        layer_types = getattr(text_config, "layer_types", None)
        window = getattr(text_config, "sliding_window", None)
        chunk = getattr(text_config, "attention_chunk_size", None)
        if layer_types is not None:
            kinds, keyed = tuple(sorted(set(layer_types))), True
        elif window is not None:
            kinds, keyed = (SLIDING,), False
        elif chunk is not None:
            kinds, keyed = (CHUNKED,), False
        else:
            kinds, keyed = (FULL,), False
        unknown = [kind for kind in kinds if kind not in (FULL, SLIDING, CHUNKED)]
        if unknown:
            raise ValueError(
                f"{name}: layers of kind {', '.join(map(repr, unknown))} keep a state that cannot "
                "be masked row by row, so neither packed segments nor draft trees would be exact. "
                "Choose a target whose layers are all attention layers "
                f"({FULL}, {SLIDING} or {CHUNKED})."
            )
        return cls(kinds, keyed, window, chunk)

    def additive(
        self,
        allowed_BQK: Tensor,
        query_position_BQ: Tensor,
        key_position_BK: Tensor,
        dtype: torch.dtype,
    ) -> Tensor | dict[str, Tensor]:
        """Masks for one forward pass: 0 where a row may look, the type's lowest value elsewhere.

        Args:
            allowed_BQK: bool, what ancestry, segments and padding allow; every query row must be
                allowed at least one key that its window reaches.
            query_position_BQ: positions of the query rows.
            key_position_BK: positions of the key slots ([1, K] broadcasts).

        Returns:
            ``[B, 1, Q, K]``, or a dict of them by layer kind for decoders that take one.
        """
        distance_BQK: Tensor | None = None
        masks: dict[str, Tensor] = {}
        for kind in self.kinds:
            visible_BQK = allowed_BQK
            if kind == SLIDING and self.sliding_window is not None:
                if distance_BQK is None:
                    distance_BQK = query_position_BQ[:, :, None] - key_position_BK[:, None, :]
                visible_BQK = allowed_BQK & (distance_BQK < self.sliding_window)
            elif kind == CHUNKED and self.chunk_size is not None:
                query_chunk_BQ = query_position_BQ // self.chunk_size
                key_chunk_BK = key_position_BK // self.chunk_size
                visible_BQK = allowed_BQK & (query_chunk_BQ[:, :, None] == key_chunk_BK[:, None, :])
            bias_BQK = torch.zeros(visible_BQK.shape, dtype=dtype, device=visible_BQK.device)
            masks[kind] = bias_BQK.masked_fill_(~visible_BQK, torch.finfo(dtype).min)[:, None]
        return masks if self.keyed else masks[self.kinds[0]]

    def ready(self, bias_B1QK: Tensor) -> Tensor | dict[str, Tensor]:
        """An additive mask as the decoder takes it; only where all layers see the same (not ``by_position``)."""
        assert not self.by_position
        return {FULL: bias_B1QK} if self.keyed else bias_B1QK


def segment_allowed(segment_BS: Tensor) -> Tensor:
    """Causal attention inside segments, [B, S, S] bool. Segment -1 is padding: it sees itself."""
    S = segment_BS.shape[1]
    same_BSS = segment_BS[:, :, None] == segment_BS[:, None, :]
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=segment_BS.device).tril_()
    self_SS = torch.eye(S, dtype=torch.bool, device=segment_BS.device)
    return (same_BSS & causal_SS & (segment_BS >= 0)[:, :, None]) | self_SS
