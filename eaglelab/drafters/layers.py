"""The decoder parts that every drafter is built from.

Attention is split in two: a layer owns its projections and positions, the caller owns the keys. What a row may
see differs between training, rollouts and decoding, so it comes in as ``attend(q, k, v) -> out``.

Letters: B sequences, N rows, U rows that ask, H heads, G key/value heads, D head width, d hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eaglelab.data.needed import pick
from eaglelab.drafters.config import DrafterConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, H, U, D], k [B, G, N, D], v [B, G, N, D]) -> [B, H, U, D], rotary positions already applied."""


Ask = Callable[[Tensor], Tensor]
"""q [B, H, U, D] -> [B, H, U, D], over keys that are there already."""


class Rotary(nn.Module):
    """cos and sin of every legal position, from the library's own rotary law."""

    cos_PD: Tensor
    sin_PD: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        positions = torch.arange(config.max_position_embeddings)[None]
        rope = LlamaRotaryEmbedding(config.to_llama())
        cos, sin = rope(torch.zeros(1, dtype=torch.float32), positions)
        self.register_buffer("cos_PD", cos[0], persistent=False)
        self.register_buffer("sin_PD", sin[0], persistent=False)

    def forward(self, position_BN: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, N, D] for int64 positions [B, N] (or [1, N])."""
        return self.cos_PD[position_BN][:, None], self.sin_PD[position_BN][:, None]


def rotate(x_BHND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to heads whose two halves are paired (Llama layout)."""
    first, second = x_BHND.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BHND * cos.to(x_BHND.dtype) + turned * sin.to(x_BHND.dtype)


class DraftAttention(nn.Module):
    """Grouped-query attention projections; ``input_size`` is d, or 2d where embedding and state are concatenated."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=False)
        self.k_proj = nn.Linear(input_size, kv_size, bias=False)
        self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)

    def forward(self, x_BNi: Tensor, cos: Tensor, sin: Tensor, attend: Attend, slot_BU: Tensor | None = None) -> Tensor:
        """[B, N, input_size] -> [B, U, d]: keys of all rows, queries of those at ``slot_BU`` (None: of all)."""
        keys = self.keys(x_BNi, cos, sin)
        if slot_BU is not None:
            cos, sin = (pick(x_B1ND[:, 0], slot_BU)[:, None] for x_B1ND in (cos, sin))
        return self.ask(pick(x_BNi, slot_BU), cos, sin, lambda q_BHUD: attend(q_BHUD, *keys))

    def ask(self, x_BUi: Tensor, cos: Tensor, sin: Tensor, attend: Ask) -> Tensor:
        """[B, U, input_size] -> [B, U, d]: queries alone, of keys that the caller has already."""
        out_BHUD = attend(rotate(self._heads(self.q_proj, x_BUi), cos, sin))
        return self.o_proj(out_BHUD.transpose(1, 2).flatten(2))

    def keys(self, x_BNi: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, with their positions, and values: [B, G, N, D] each."""
        return rotate(self._heads(self.k_proj, x_BNi), cos, sin), self._heads(self.v_proj, x_BNi)

    def _heads(self, project: nn.Linear, x_BNi: Tensor) -> Tensor:
        return project(x_BNi).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def compile_parts(network: nn.Module) -> None:
    """``torch.compile`` for the MLP, which lies between two attentions; weights and their names stay as they are.

    What a row may see comes in as a function and stays outside of the compiled part.
    """
    for part in network.modules():
        if isinstance(part, SwiGLU):
            part.compile(dynamic=True)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BNd: Tensor) -> Tensor:
        return self.down_proj(_GatedUp.apply(self.gate_proj(x_BNd), self.up_proj(x_BNd)))


class _GatedUp(torch.autograd.Function):
    """silu(gate) * up, which keeps its two inputs for the backward; written out it would keep silu(gate), too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        share = gate.sigmoid()
        silu = gate * share
        grad_gate = share.mul_(1 + gate - silu).mul_(up).mul_(grad)
        return grad_gate, silu.mul_(grad)
