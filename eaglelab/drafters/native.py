"""Attention over the target-derived rows, forward with its log-sum-exp and backward from one, in linear memory.

Row ``r`` sees the rows of its segment up to itself. Three kernels compute the same: a flash kernel with an additive
mask for short packed rows, the same kernel without a mask where plain causal attention is segment-isolated, and blocks
of rows elsewhere, whose masks are as large as a block and exist one at a time.

Letters: B sequences, R rows, Q rows of a block, K keys that a block can see, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from eaglelab.target.unpacking import MASKED_LENGTH

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

MASKED_ROWS = MASKED_LENGTH
"""Longer packed rows are computed in blocks: a mask of all pairs would be quadratic in their number."""
FLASH_BLOCK = 256
SCORES = 2**26
"""Entries of a written-out block: 256 MiB in fp32, whatever the length."""


class NativeAttention(Protocol):
    """Softmax attention from queries q [B, H, Q, D] to keys k and values v [B, H, K, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, H, Q, D] and log-sum-exp of the scaled scores [B, H, Q], fp32 or wider."""

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k and v.

        Given output and log-sum-exp of a *larger* softmax that these keys are a part of, it returns exactly their part
        of its gradient.
        """


class FlashAttention:
    """One kernel call (CPU).

    Args:
        bias: additive [B, 1, Q, K]; None: causal.
    """

    def __init__(self, bias: Tensor | None) -> None:
        self.bias = bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = _flash(q, k, v, 0.0, self.bias is None, attn_mask=self.bias, scale=q.shape[-1] ** -0.5)
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        scale, causal = q.shape[-1] ** -0.5, self.bias is None
        grads: tuple[Tensor, ...] = _flash_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=self.bias, scale=scale
        )
        return grads


class WrittenOutAttention:
    """Scores written out, softmax in fp32: any device.

    Args:
        bias: additive [B or 1, 1, Q, K].
    """

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k)
        lse = scores.logsumexp(-1)
        return scores.sub_(lse[..., None]).exp_().to(v.dtype) @ v, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        weight = self._scores(q, k).sub_(lse[..., None]).exp_()
        grad_v = weight.to(grad.dtype).mT @ grad
        inner = (grad * out).sum(-1, keepdim=True, dtype=weight.dtype)
        grad_scores = weight.mul_((grad @ v.mT).to(weight.dtype).sub_(inner)).mul_(q.shape[-1] ** -0.5).to(q.dtype)
        return grad_scores @ k, grad_scores.mT @ q, grad_v

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        return (q @ k.mT).to(wide).mul_(q.shape[-1] ** -0.5).add_(self.bias)


def flash_block(rows: int) -> int:
    """Rows of a block, about :data:`FLASH_BLOCK`: blocks of equal size, and none for a few rows beyond."""
    return max(-(-rows // max(round(rows / FLASH_BLOCK), 1)), 1)


class BlockedAttention:
    """Block after block of rows, each over the keys from its first segment's start to its own end.

    Args:
        start_BR: int64 [B or 1, R], the first row that each row sees.
        last_BR: int64 [B or 1, R], the last one; None: the row itself.
        spans: the least of the former and the greatest of the latter over the sequences, for each row, where the host
            knows them; None: the device is asked, once.
    """

    def __init__(
        self, start_BR: Tensor, last_BR: Tensor | None = None, spans: tuple[list[int], list[int]] | None = None
    ) -> None:
        self.start_BR = start_BR
        self.last_BR = torch.arange(start_BR.shape[1], device=start_BR.device)[None] if last_BR is None else last_BR
        self._spans = spans

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, keys, kernel in self._blocks(q):
            out[:, :, rows], lse[:, :, rows] = kernel.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys])
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys, kernel in self._blocks(q):
            block = (x[:, :, rows] for x in (out, lse))
            grads = kernel.backward(grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], *block)
            grad_q[:, :, rows] = grads[0]
            grad_k[:, :, keys] += grads[1]
            grad_v[:, :, keys] += grads[2]
        return grad_q, grad_k, grad_v

    def _blocks(self, q: Tensor) -> Iterator[tuple[slice, slice, NativeAttention]]:
        R, on_cpu = q.shape[2], q.device.type == "cpu"
        size = flash_block(R) if on_cpu else min(max(SCORES // (q.shape[0] * q.shape[1] * R), 16), MASKED_ROWS)
        first_R, last_R = self.spans()
        for first in range(0, R, size):
            rows = slice(first, min(first + size, R))
            keys = slice(first_R[first], last_R[rows.stop - 1] + 1)
            bias = self._bias(rows, keys, q.dtype)
            kernel: NativeAttention = FlashAttention(bias) if on_cpu else WrittenOutAttention(bias)
            yield rows, keys, kernel

    def spans(self) -> tuple[list[int], list[int]]:
        """The first and the last key of each row over all sequences."""
        if self._spans is None:
            first_R, last_R = torch.stack([self.start_BR.amin(0), self.last_BR.amax(0)]).tolist()
            self._spans = first_R, last_R
        return self._spans

    def _bias(self, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        key_K = torch.arange(keys.start, keys.stop, device=self.start_BR.device)
        seen_BQK = (key_K >= self.start_BR[:, rows, None]) & (key_K <= self.last_BR[:, rows, None])
        bias_BQK = torch.zeros(seen_BQK.shape, dtype=dtype, device=seen_BQK.device)
        return bias_BQK.masked_fill_(~seen_BQK, -torch.inf)[:, None]
