"""Rollout attention against the dense oracle, in values, gradients and influence."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglelab.data.rows import compile_rows, first_seen
from eaglelab.drafters import attention, native
from eaglelab.drafters.attention import RolloutContext
from eaglelab.drafters.joint import dense_joint_attention, joint_attention
from eaglelab.drafters.native import BlockedAttention, FlashAttention, WrittenOutAttention
from tests.oracles.layout import packed
from tests.oracles.visibility import dense_rollout_attention, nodes


def rows_of(lengths_by_sequence, S):
    valid, segment, position = packed(lengths_by_sequence, S)
    return compile_rows(valid, segment, position, valid)


def random_qkv(rows, steps, H=4, G=2, D=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    B, R = rows.legal_BR.shape
    return [
        torch.randn(steps + 1, B, heads, R, D, dtype=torch.float64, generator=g, requires_grad=True)
        for heads in (H, G, G)
    ]


def rollout(rows, q, k, v):
    context = RolloutContext(rows)
    out = [context.native(q[0], k[0], v[0])]
    out += [context.own(q[s], k[s], v[s]) for s in range(1, len(q))]
    return torch.stack(out)


layouts = st.lists(st.lists(st.integers(2, 6), min_size=1, max_size=3), min_size=1, max_size=2)


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(0, 7), st.sampled_from([(4, 4), (4, 2), (2, 1)]), st.integers(0, 10**6))
def test_values_and_gradients_equal_the_oracle(lengths, steps, heads, seed):
    """Random packed and padded layouts, grouped heads, 0 to 7 draft steps, float64."""
    rows = rows_of(lengths, max(sum(x) for x in lengths) + 1)
    qkv = random_qkv(rows, steps, *heads, seed=seed)
    legal = rows.legal_BR[None, :, None, :, None]
    ours, oracle = (torch.where(legal, f(rows, *qkv), 0) for f in (rollout, dense_rollout_attention))
    torch.testing.assert_close(ours, oracle, rtol=1e-10, atol=1e-12)

    weight = torch.randn(oracle.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((out * weight).sum(), qkv) for out in (ours, oracle)]
    for mine, exact in zip(*grads, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("lengths", [[[6]], [[3, 4], [5]]])
def test_perturbing_one_key_moves_exactly_the_rows_that_may_see_it(lengths):
    """No influence of siblings, future rows, other segments or padding."""
    steps = 3
    rows = rows_of(lengths, max(sum(x) for x in lengths) + 2)
    q, k, v = (x.detach() for x in random_qkv(rows, steps))
    before = rollout(rows, q, k, v)
    R = rows.legal_BR.shape[1]
    for b in range(len(lengths)):
        graph = nodes(rows, b, steps)
        for key in graph:
            if not key.legal:
                continue
            moved_v = v.clone()
            moved_v[key.step, b, :, key.slot] += 1.0
            moved = (rollout(rows, q, k, moved_v) - before).abs().amax(dim=(2, 4)) > 0  # [steps + 1, B, R]
            expected = torch.zeros(steps + 1, len(lengths), R, dtype=torch.bool)
            for query in graph:
                if query.legal:
                    expected[query.step, b, query.slot] = query.sees(key)
            moved = moved & rows.legal_BR
            assert moved.equal(expected)


def causal_bias(R: int, dtype=torch.float32) -> torch.Tensor:
    return torch.full((1, 1, R, R), -torch.inf, dtype=dtype).triu(1)


def stacked(q, k, v, own_k_BHRsD, own_v_BHRsD, kernel):
    """Own keys and values of all steps in one tensor."""
    return joint_attention(q, k, v, own_k_BHRsD.unbind(3), own_v_BHRsD.unbind(3), kernel)


@pytest.mark.parametrize("masked", [False, True])
def test_one_dense_softmax_is_equal(masked):
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 6, 4)] * 3 + [(2, 3, 6, 2, 4)] * 2
    inputs = [torch.randn(x, generator=g) for x in shapes]
    bias = torch.randn(2, 1, 6, 6, generator=g) if masked else None
    torch.testing.assert_close(stacked(*inputs, FlashAttention(bias)), dense_joint_attention(*inputs, bias))


def written_out_everywhere():
    """Blocks as on a device without the flash kernel of the CPU."""
    return patch.object(native, "FlashAttention", WrittenOutAttention)


@settings(max_examples=40, deadline=None)
@given(
    layouts, st.integers(0, 4), st.sampled_from([(4, 2), (2, 2)]), st.booleans(), st.integers(1, 5), st.integers(0, 9)
)
def test_blocks_of_rows_equal_the_oracle(lengths, steps, heads, flash, size, seed):
    """Rows past MASKED_ROWS, with the CPU's kernel and with written-out scores: values and gradients, float64."""
    rows = rows_of(lengths, max(sum(x) for x in lengths) + 1)
    qkv = random_qkv(rows, steps, *heads, seed=seed)
    legal = rows.legal_BR[None, :, None, :, None]
    with patch.object(attention, "MASKED_ROWS", 0), patch.object(native, "FLASH_BLOCK", size):
        rows.causal = False  # also a single segment in blocks
        with nullcontext() if flash else written_out_everywhere():
            ours = torch.where(legal, rollout(rows, *qkv), 0)
            weight = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            mine = torch.autograd.grad((ours * weight).sum(), qkv)
    oracle = torch.where(legal, dense_rollout_attention(rows, *qkv), 0)
    torch.testing.assert_close(ours, oracle, rtol=1e-10, atol=1e-12)
    for grad, exact in zip(mine, torch.autograd.grad((oracle * weight).sum(), qkv), strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-9, atol=1e-11)


def test_a_row_first_sees_its_segments_first_row():
    rows = rows_of([[3, 4], [5]], 9)  # 2 + 3 rows; 4 rows and a filler
    assert first_seen(rows).tolist() == [[0, 0, 2, 2, 2], [0, 0, 0, 0, 4]]


def test_a_block_reaches_back_to_its_first_segment_only():
    """Two sequences whose segments end elsewhere; keys of a block start at the earlier of the two."""
    blocks = BlockedAttention(torch.tensor([[0, 0, 0, 3, 3, 3], [0, 0, 2, 2, 2, 5]]))
    with patch.object(native, "FLASH_BLOCK", 2):
        spans = [
            (rows.start, rows.stop, keys.start, keys.stop) for rows, keys, _ in blocks._blocks(torch.zeros(2, 1, 6, 4))
        ]
    assert spans == [(0, 2, 0, 2), (2, 4, 0, 4), (4, 6, 2, 6)]


@pytest.mark.parametrize("kernel", ["causal", "masked", "written out"])
def test_gradcheck(kernel):
    g = torch.Generator().manual_seed(0)
    B, H, R, D, s = 1, 2, 4, 3, 2
    shapes = [(B, H, R, D)] * 3 + [(B, H, R, s, D)] * 2
    inputs = [torch.randn(x, dtype=torch.float64, generator=g, requires_grad=True) for x in shapes]
    bias = torch.zeros(B, 1, R, R, dtype=torch.float64)
    bias[0, 0, 1, 0] = bias[0, 0, 2, 3] = -torch.inf
    kernels = {"causal": FlashAttention(None), "masked": FlashAttention(bias), "written out": WrittenOutAttention(bias)}
    assert torch.autograd.gradcheck(lambda *x: stacked(*x, kernels[kernel]), inputs)


@pytest.mark.parametrize("kernel", [FlashAttention(None), WrittenOutAttention(causal_bias(2))], ids=["flash", "dense"])
def test_large_scores_do_not_overflow(kernel):
    """Log-sum-exp merging: own scores of +-1e4 stay finite and give the limit."""
    q = torch.full((1, 1, 2, 1), 100.0)
    k, v = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
    for sign, expected in ((1.0, 7.0), (-1.0, 0.0)):
        own_k, own_v = torch.full((1, 1, 2, 1, 1), sign * 100.0), torch.full((1, 1, 2, 1, 1), 7.0)
        out = stacked(q, k, v, own_k, own_v, kernel)
        torch.testing.assert_close(out, torch.full_like(out, expected))


def test_bf16_blocks_stay_close_to_fp32():
    rows = rows_of([[20, 30], [45]], 50)
    q, k, v = (x.detach().float() for x in random_qkv(rows, 2, D=16))
    exact = dense_rollout_attention(rows, q, k, v)
    with patch.object(attention, "MASKED_ROWS", 0), written_out_everywhere():
        rounded = rollout(rows, q.bfloat16(), k.bfloat16(), v.bfloat16()).float()
    legal = rows.legal_BR[None, :, None, :, None]
    assert float(torch.where(legal, rounded - exact, 0).abs().max()) < 0.05


@pytest.mark.parametrize(("B", "H", "R"), [(1, 8, 4096), (4, 32, 2048), (1, 32, 32_768), (64, 64, 8192)])
def test_scores_that_are_written_out_stay_within_their_bound(B, H, R):
    """As on a GPU: blocks as large as the bound allows, of 16 rows at least, whatever the batch and the length."""
    spans = [0] * R, list(range(R))
    blocks = BlockedAttention(torch.zeros(1, R, dtype=torch.int64, device="meta"), spans=spans)
    q = torch.empty(B, H, R, 64, device="meta")
    sizes = [rows.stop - rows.start for rows, _, _ in blocks._blocks(q)]
    assert sum(sizes) == R
    largest = max(sizes)
    assert B * H * largest * R <= native.SCORES or largest == 16
    assert B * H * (largest + 1) * R > native.SCORES or largest == native.MASKED_ROWS
