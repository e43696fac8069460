"""Losses over rows whose intermediate values never outlive a chunk of rows.

A token head turns every row into V logits; kept for a whole batch they would dwarf everything else in memory. Here
a chunk's loss is computed and differentiated at once, so that only gradients of the size of the inputs remain.

Letters: M rows, d hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

CHUNK_ENTRIES = 2**23
"""Of a chunk's logits: 32 MiB in fp32."""
CHUNK_ROWS = (256, 1024)
"""At least and at most; fewer rows leave a matrix product waiting for the head's weights."""


def chunk_rows(vocabulary: int, steps: int = 1) -> int:
    """Rows of a chunk; ``steps`` states of each row are read at once, which counts as so many rows."""
    least, most = CHUNK_ROWS
    return max(-(-least // steps), min(most, CHUNK_ENTRIES // (vocabulary * steps)))


ChunkLoss = Callable[[Tensor, slice], Tensor]
"""(states of a chunk [m, d], which rows they are) -> that chunk's loss, summed over its rows, fp32."""


def chunked_sum(
    loss_of: ChunkLoss, state_Md: Tensor, parameters: Iterable[Tensor] = (), *, chunk: int = 1024
) -> Tensor:
    """Sum of ``loss_of`` over all chunks, differentiable in ``state_Md`` and ``parameters``.

    Args:
        loss_of: called once per chunk, in order; what it measures on the side it may collect itself.
        state_Md: rows.
        parameters: trained tensors that ``loss_of`` reads. Their gradients are accumulated in fp32.
        chunk: rows per piece.

    Returns:
        A scalar in fp32. Without gradients (``torch.no_grad``) nothing but the sum is computed.
    """
    trained = [p for p in parameters if p.requires_grad]
    with torch.profiler.record_function("eaglelab::head_and_loss"):
        return _ChunkedSum.apply(loss_of, chunk, state_Md, *trained)


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_of: ChunkLoss, chunk: int, state: Tensor, *parameters: Tensor) -> Tensor:
        wants = ctx.needs_input_grad[2:]
        total = torch.zeros((), device=state.device, dtype=torch.promote_types(state.dtype, torch.float32))
        state_grad = torch.empty_like(state) if wants[0] else None
        sums = [torch.zeros_like(p, dtype=total.dtype) for p in parameters if any(wants)]
        for start in range(0, state.shape[0], chunk):
            piece = slice(start, start + chunk)
            with torch.set_grad_enabled(any(wants)):
                rows = state[piece].detach().requires_grad_(wants[0])
                loss = loss_of(rows, piece)
            total += loss.detach()
            sources = [*([rows] if wants[0] else []), *(parameters if any(wants) else ())]
            grads = list(torch.autograd.grad(loss, sources)) if sources else []
            if state_grad is not None:
                state_grad[piece] = grads.pop(0)
            for accumulated, grad in zip(sums, grads, strict=True):
                accumulated += grad
        ctx.has_state_grad = state_grad is not None
        ctx.save_for_backward(*([] if state_grad is None else [state_grad]), *sums)
        ctx.dtypes = [p.dtype for p in parameters if any(wants)]
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        state_grad = saved.pop(0) if ctx.has_state_grad else None
        if state_grad is not None:
            state_grad = (grad_total * state_grad).to(state_grad.dtype)
        parameter_grads = [(grad_total * grad).to(dtype) for grad, dtype in zip(saved, ctx.dtypes, strict=True)]
        return None, None, state_grad, *parameter_grads
