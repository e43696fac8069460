"""Rollout attention through FlexAttention: one kernel over the native keys, own keys merged by log-sum-exp.

Blocks of keys that no row of a block sees are skipped, and scores are written out nowhere. The kernel exists for CUDA,
where ``torch.compile`` builds it at its first use; uncompiled, the same functions are a dense reference.

Letters: B sequences, U rows that ask, R native keys, Q and K blocks of them, H heads, G key/value heads, m = H / G,
D head width, s draft steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from eaglelab.drafters.joint import joint_attention
from eaglelab.drafters.native import BlockedAttention
from eaglelab.kernels.selection import Kernel

BLOCK = 128
"""Rows and keys of a block of the mask: the least that the kernel's own tiles all divide."""
GRAPHS = 64
"""How many cases one function may be compiled for: head shapes, number types, one sequence or several, gradients or
none. Past its limit ``torch.compile`` raises here, since going on uncompiled would write all scores out."""
OPTIONS = {"BACKEND": "TRITON"}
"""Also where few rows ask: the kernel that is meant for decoding was on no probation."""
LEAST_HEAD_DIM = 16
"""The kernel's matrix products take no narrower heads."""
BOUNDS = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""How far results may be from those in fp32, relative to the largest entry: what rounding does, with TF32 products in
fp32; a key too many or too few moves a row by its own size."""


def block_mask(start_BU: Tensor, last_BU: Tensor, sequences: int, keys: int) -> BlockMask:
    """The mask of rows that each see one run of keys, made on the device without asking it anything.

    Runs ascend, so that the rows which see anything of a block of keys are neighbours, and so are those that see all
    of it: two searches per block of keys, linear in rows and keys. The kernel wants its lists as one integer per pair
    of blocks: 1 MiB per sequence of 32,768 rows, with those of the backward.

    Args:
        start_BU, last_BU: int64 [B or 1, U], first and last key of each row; neither falls along U.
        sequences, keys: B and R.
    """
    B, U = sequences, start_BU.shape[1]
    start_BU, last_BU = (x.expand(B, U).to(torch.int32).contiguous() for x in (start_BU, last_BU))
    first_BK = torch.arange(0, keys, BLOCK, dtype=torch.int32, device=start_BU.device).expand(B, -1).contiguous()
    final_BK = first_BK + BLOCK - 1
    seen_BQK = _blocks_within(
        torch.searchsorted(last_BU, first_BK), torch.searchsorted(start_BU, final_BK, right=True), U, whole=False
    )
    whole_BQK = _blocks_within(
        torch.searchsorted(last_BU, final_BK), torch.searchsorted(start_BU, first_BK, right=True), U, whole=True
    )

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= start_BU[b, row]) & (key <= last_BU[b, row])

    lists = (*_listed(seen_BQK & ~whole_BQK), *_listed(whole_BQK))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(U, keys))


def _blocks_within(low_BK: Tensor, high_BK: Tensor, rows: int, *, whole: bool) -> Tensor:
    """bool [B, Q, K]: blocks of rows of which all (``whole``) or some are in ``low <= row < high``."""
    first_Q1 = torch.arange(0, rows, BLOCK, device=low_BK.device)[:, None]
    low_B1K, high_B1K = low_BK[:, None], high_BK[:, None]
    if whole:
        return (first_Q1 >= low_B1K) & (first_Q1 + BLOCK <= high_B1K)
    return (low_B1K < high_B1K) & (first_Q1 < high_B1K) & (first_Q1 + BLOCK > low_B1K)


def _listed(chosen_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of rows has, and which, these first: int32 [B, 1, Q] and [B, 1, Q, K]."""
    order_BQK = chosen_BQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen_BQK.sum(-1, dtype=torch.int32)[:, None], order_BQK.to(torch.int32)[:, None].contiguous()


def flex_joint_attention(
    q_BHUD: Tensor,
    k_BGRD: Tensor,
    v_BGRD: Tensor,
    own_k: Sequence[Tensor],
    own_v: Sequence[Tensor],
    mask: BlockMask,
) -> Tensor:
    """One softmax over the native keys that ``mask`` shows and each row's own keys.

    Args:
        q_BHUD: queries.
        k_BGRD, v_BGRD: native keys, values; heads are shared, not spread.
        own_k, own_v: for each draft step keys and values [B, G, U, D], visible to the row's own queries only.
        mask: of :func:`block_mask`.

    Returns:
        [B, H, U, D], differentiable in all tensors.
    """
    with torch.autocast(q_BHUD.device.type, enabled=False):
        out_BHUD, lse_BHU = _attend(q_BHUD, k_BGRD, v_BGRD, mask)
    if own_k:
        merged: Tensor = _Merged.apply(out_BHUD, lse_BHU, q_BHUD, *own_k, *own_v)
        return merged
    return out_BHUD


def _attend(q_BHUD: Tensor, k_BGRD: Tensor, v_BGRD: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the native part."""
    function: Any = compiled() if q_BHUD.device.type == "cuda" else flex_attention
    shared = q_BHUD.shape[1] != k_BGRD.shape[1]
    options: dict[str, Any] = {"enable_gqa": shared, "kernel_options": OPTIONS, "return_aux": AuxRequest(lse=True)}
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        out_BHUD, aux = function(q_BHUD, k_BGRD, v_BGRD, block_mask=mask, **options)
    return out_BHUD, aux.lse


@functools.cache
def compiled() -> Callable[..., Any]:
    """``flex_attention`` for sizes of all batches: as few graphs as can be."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


class _Merged(torch.autograd.Function):
    """The native part and the own keys in one softmax; of what is as large as q it keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, q: Tensor, *own: Tensor) -> Tensor:
        ctx.scale, ctx.groups = q.shape[-1] ** -0.5, own[0].shape[1]
        own_k, own_v = own[: len(own) // 2], own[len(own) // 2 :]
        q_BGmUD = _grouped(q, ctx.groups)
        score_s = torch.stack([(q_BGmUD * key[:, :, None]).sum(-1, dtype=lse.dtype) * ctx.scale for key in own_k])
        lse_BGmU = _grouped(lse, ctx.groups)
        whole = torch.logaddexp(lse_BGmU, score_s.logsumexp(0))
        native_weight, weight_s = (lse_BGmU - whole).exp(), (score_s - whole).exp_()
        merged = _grouped(out, ctx.groups) * native_weight[..., None].to(q.dtype)
        for weight, value in zip(weight_s, own_v, strict=True):
            merged.addcmul_(weight[..., None].to(q.dtype), value[:, :, None])
        ctx.save_for_backward(out, q, native_weight, weight_s, *own)
        return merged.flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, q, native_weight, weight_s, *own = ctx.saved_tensors
        own_k, own_v = own[: len(own) // 2], own[len(own) // 2 :]
        wide = weight_s.dtype
        grad, out, q = (_grouped(x, ctx.groups) for x in (grad, out, q))
        native_inner = (grad * out).sum(-1, dtype=wide)
        inner_s = torch.stack([(grad * value[:, :, None]).sum(-1, dtype=wide) for value in own_v])
        mean = native_weight * native_inner + (weight_s * inner_s).sum(0)
        grad_lse = native_weight * (native_inner - mean)
        grad_out = grad * native_weight[..., None].to(q.dtype)
        grad_score_s = (weight_s * (inner_s - mean) * ctx.scale).to(q.dtype)[..., None]
        grad_q, grad_own_k, grad_own_v = torch.zeros_like(q), [], []
        for key, grad_score, weight in zip(own_k, grad_score_s, weight_s, strict=True):
            grad_q.addcmul_(grad_score, key[:, :, None])
            grad_own_k.append((grad_score * q).sum(2))
            grad_own_v.append((weight[..., None].to(q.dtype) * grad).sum(2))
        return *(x.flatten(1, 2) for x in (grad_out, grad_lse, grad_q)), *grad_own_k, *grad_own_v


def _grouped(x_BH: Tensor, groups: int) -> Tensor:
    """[B, H, ...] -> [B, G, m, ...]."""
    return x_BH.unflatten(1, (groups, -1))


# ---- probation ---------------------------------------------------------------------------------------------------


@functools.cache
def flex_kernel(heads: int, groups: int, head_dim: int) -> Kernel:
    """The kernel for ``heads`` query heads over ``groups`` key heads, on probation for itself: its tiles are chosen by
    the head width, and are too large for some devices."""

    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype in BOUNDS and head_dim >= LEAST_HEAD_DIM

    def disagreement(device: torch.device, dtype: torch.dtype) -> float:
        # a verdict may be asked for in a validation or in a checkpointed step: neither is to notice
        with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
            shape = heads, groups, head_dim
            return max(flex_disagreement(*shape, device, dtype, single=single) for single in (False, True))

    name = f"FlexAttention of {heads} query and {groups} key heads, {head_dim} wide,"
    return Kernel(name, supports, disagreement, lambda dtype: BOUNDS[dtype])


def flex_usable(q_BHUD: Tensor, k_BGRD: Tensor) -> bool:
    """Whether the kernel is for these."""
    kernel = flex_kernel(q_BHUD.shape[1], k_BGRD.shape[1], q_BHUD.shape[3])
    return kernel.usable(q_BHUD.device, q_BHUD.dtype)


def flex_disagreement(
    heads: int, groups: int, head_dim: int, device: torch.device, dtype: torch.dtype, *, single: bool
) -> float:
    """Largest difference from blocks of PyTorch's operations in fp32, over output and all gradients, each relative to
    its largest entry: packed rows, a part of which asks, and two draft steps.

    Two sizes that are the same in a graph's first batch must be so in all of its batches; here no two are, so that the
    graph made now is that of training, too.

    Args:
        single: one sequence, which has a graph of its own.
    """
    several, Q, K = [size for size in range(2, 8) if size not in (heads, groups, head_dim)][:3]
    B, U, R = 1 if single else several, Q * BLOCK - 87, K * BLOCK - 99
    g = torch.Generator().manual_seed(0)
    start_BR = torch.stack([torch.arange(R) // segment * segment for segment in (150, 401, R, 37, 90)[:B]])
    slot_BU = torch.stack([torch.randperm(R, generator=g)[:U].sort().values for _ in range(B)])
    start_BU, slot_BU = start_BR.gather(1, slot_BU).to(device), slot_BU.to(device)
    shapes = [(heads, U), *[(groups, R)] * 2, *[(groups, U)] * 4]
    drawn = [torch.randn(B, *shape, head_dim, generator=g).to(device, dtype) for shape in shapes]
    weight = torch.randn(B, heads, U, head_dim, generator=g).to(device, dtype)

    def flex(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        return flex_joint_attention(q, k, v, own[:2], own[2:], block_mask(start_BU, slot_BU, B, R))

    def in_blocks(q: Tensor, *keys: Tensor) -> Tensor:
        k, v, *own = (x.repeat_interleave(heads // groups, dim=1) for x in keys)
        return joint_attention(q, k, v, own[:2], own[2:], BlockedAttention(start_BU, slot_BU))

    wide = torch.promote_types(dtype, torch.float32)
    ours = _with_gradients(flex, drawn, weight)
    exact = _with_gradients(in_blocks, [x.to(wide) for x in drawn], weight.to(wide))
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(ours, exact, strict=True))


def _with_gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, weight)]
