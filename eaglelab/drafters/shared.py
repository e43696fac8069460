"""Keys and values that several passes read although each pass is back-propagated on its own (HASS).

Every pass but the last hands its gradient to a copy without a history; the last one adds the sum to its own gradient
and takes both to the weights. So keys are computed once and back-propagated once, whatever the number of passes, and
all weights get the rest of their gradient in one backward, the one that several processes exchange.

Letters: B sequences, N rows, G key/value heads, D head width, d hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from eaglelab.drafters.layers import rotate

Read = Callable[[], Tensor]
"""() -> data [B, N, i], the same each time; no gradient is asked for."""
Angles = Callable[[], tuple[Tensor, Tensor]]
"""() -> cos and sin [B, 1, N, D]."""
LinearMap = tuple[Tensor, Tensor | None]
"""Weight and bias."""


class SharedKeys:
    """Keys and values of one state for the passes that read them.

    Args:
        keys: with the history that leads to the weights.
    """

    def __init__(self, keys: tuple[Tensor, Tensor]) -> None:
        self._keys = keys
        self._copies = [x.detach().requires_grad_() for x in keys]

    def read(self, *, last: bool) -> tuple[Tensor, Tensor]:
        """For one pass, which is back-propagated before the next one reads; ``last``: no other pass follows."""
        k, v = _Gathered.apply(self._copies, *self._keys) if last else self._copies
        return k, v


class _Gathered(torch.autograd.Function):
    """The same values; the gradient is that of all readers."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *keys: Tensor) -> tuple[Tensor, ...]:
        ctx.copies = copies
        return tuple(x.view_as(x) for x in keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        copies, ctx.copies = ctx.copies, []
        pairs = zip(grads, copies, strict=True)
        return None, *(grad if copy.grad is None else copy.grad.add_(grad) for grad, copy in pairs)


def linear_of_data(read: Read, linear: LinearMap) -> Tensor:
    """A linear map of what ``read`` gives, which is read again in the backward and not kept."""
    out: Tensor = _LinearOfData.apply(read, *linear)
    return out


def keys_of_data(read: Read, key_map: LinearMap, value_map: LinearMap, rotary: Angles) -> tuple[Tensor, Tensor]:
    """Keys and values of rows that no gradient goes to; differentiable in the maps, and nothing else is kept.

    Args:
        read: what they are made of.
        key_map, value_map: :meth:`~eaglelab.drafters.FeatureDrafter.key_maps`.
        rotary: of their positions.

    Returns:
        Keys, with their positions, and values: [B, G, N, D] each.
    """
    keys: tuple[Tensor, Tensor] = _KeysOfData.apply(read, rotary, *key_map, *value_map)
    return keys


class _LinearOfData(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, read: Read, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.read, ctx.has_bias, ctx.dtype = read, bias is not None, weight.dtype
        return F.linear(read(), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor | None]:
        grad_No = grad.flatten(0, 1)
        grad_weight = grad_No.mT @ ctx.read().flatten(0, 1).to(grad.dtype)
        return None, grad_weight.to(ctx.dtype), grad_No.sum(0, dtype=ctx.dtype) if ctx.has_bias else None


class _KeysOfData(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        read: Read,
        rotary: Angles,
        k_weight: Tensor,
        k_bias: Tensor | None,
        v_weight: Tensor,
        v_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.read, ctx.rotary, ctx.has_bias, ctx.dtype = read, rotary, k_bias is not None, k_weight.dtype
        x_BNi, (cos, sin) = read(), rotary()
        k, v = (
            rearrange(F.linear(x_BNi, weight, bias), "b n (g c) -> b g n c", c=cos.shape[-1])
            for weight, bias in ((k_weight, k_bias), (v_weight, v_bias))
        )
        return rotate(k, cos, sin), v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        x_Ni, (cos, sin) = ctx.read().flatten(0, 1).to(grad_k.dtype), ctx.rotary()
        found: list[Tensor | None] = [None, None]
        for grad_BGND in (rotate(grad_k, cos, -sin), grad_v):  # turned back
            grad_No = rearrange(grad_BGND, "b g n c -> (b n) (g c)")
            found += [(grad_No.mT @ x_Ni).to(ctx.dtype), grad_No.sum(0, dtype=ctx.dtype) if ctx.has_bias else None]
        return tuple(found)
