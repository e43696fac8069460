"""FlexAttention, uncompiled on the CPU, against the dense oracle and the blocks; its block mask against the dense mask.

Uncompiled it reads the mask function alone; which blocks a compiled kernel would compute is in the lists.
"""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as library
from torch.utils.checkpoint import checkpoint

from eaglelab.data.needed import pick
from eaglelab.data.rows import first_seen
from eaglelab.drafters import attention, flex
from eaglelab.drafters.attention import RolloutContext
from eaglelab.variants import Eagle3Module, EagleModule, HassModule, OptimConfig, View
from tests.drafters.test_attention import layouts, random_qkv, rows_of
from tests.oracles.visibility import dense_rollout_attention
from tests.variants.conftest import make_batch, tiny_target
from tests.variants.test_host_syncs import Watch


@contextlib.contextmanager
def uncompiled():
    """Differentiable on a CPU: the library refuses that for the sake of its compiled kernel, which has no backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_validate_device", lambda *_: None)
        patch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


@contextlib.contextmanager
def flex_everywhere():
    with uncompiled(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "flex_usable", lambda *_: True)
        yield


def some_slots(rows, share: float, seed: int) -> torch.Tensor | None:
    """Ascending row slots, as many of each sequence; None: all."""
    B, R = rows.legal_BR.shape
    if share == 1:
        return None
    g = torch.Generator().manual_seed(seed)
    U = max(round(share * R), 1)
    return torch.stack([torch.randperm(R, generator=g)[:U].sort().values for _ in range(B)])


def mask_of(rows, slot_BU):
    return RolloutContext(rows, slot_BU)._seen.block_mask()


def blocks_of(number, index, columns) -> torch.Tensor:
    """bool [B, rows, columns] from the lists of a block mask."""
    chosen = torch.zeros(*number.shape[:1], number.shape[2], columns, dtype=torch.bool)
    for b in range(number.shape[0]):
        for i in range(number.shape[2]):
            chosen[b, i, index[b, 0, i, : number[b, 0, i]].long()] = True
    return chosen


# ---- which blocks --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(2, 14), min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from([1, 0.5, 0.2]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 99),
)
def test_blocks_that_are_computed_are_those_with_a_visible_pair(lengths, share, size, seed):
    """And a block is called full exactly when all its pairs are visible; lists of the backward say the same."""
    rows = rows_of(lengths, max(sum(x) for x in lengths) + 1)
    slot_BU = some_slots(rows, share, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", size)
        mask = mask_of(rows, slot_BU)
    visible_BUR = pick(rows.visible(), slot_BU)
    B, U, R = visible_BUR.shape
    dense = library.create_mask(mask.mask_mod, B, 1, U, R, device="cpu")[:, 0]
    if rows.causal:  # fillers of a batch without packing see what is before them; nobody asks
        legal_BU1 = pick(rows.legal_BR, slot_BU)[..., None]
        assert (dense & legal_BU1).equal(visible_BUR & legal_BU1)
        visible_BUR = dense
    assert dense.equal(visible_BUR)
    Q, K = -(-U // size), -(-R // size)
    padded = torch.zeros(B, Q * size, K * size)
    padded[:, :U, :R] = visible_BUR
    share_BQK = padded.view(B, Q, size, K, size).mean(dim=(2, 4))
    partial, whole = (share_BQK > 0) & (share_BQK < 1), share_BQK == 1
    assert blocks_of(mask.kv_num_blocks, mask.kv_indices, K).equal(partial)
    assert blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices, K).equal(whole)
    assert blocks_of(mask.q_num_blocks, mask.q_indices, Q).equal(partial.mT)
    assert blocks_of(mask.full_q_num_blocks, mask.full_q_indices, Q).equal(whole.mT)
    assert mask.to_dense()[:, 0].bool().equal(partial | whole)
    assert mask.shape == (B, 1, U, R)


@pytest.mark.parametrize("rows_each", [256, 300])
def test_blocks_of_packed_rows_are_linear_in_their_number(rows_each):
    """Twice the rows, about twice the blocks; in one segment they would be four times as many."""

    def computed(segments):
        mask = mask_of(rows_of([[rows_each + 1] * segments], (rows_each + 1) * segments), None)
        return int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())

    count = {segments: computed(segments) for segments in (2, 4, 8, 16)}
    per_segment = -(-rows_each // flex.BLOCK) + 1  # blocks that a segment can touch
    for segments in count:
        assert count[segments] <= segments * per_segment * (per_segment + 1) / 2
    assert count[16] <= 2.1 * count[8]


def test_full_blocks_are_used():
    """640 rows of one segment: 5 blocks on the diagonal, the 10 below are full."""
    mask = mask_of(rows_of([[641], [641]], 641), None)
    assert mask.kv_num_blocks.sum(-1).flatten().tolist() == [5, 5]
    assert mask.full_kv_num_blocks.sum(-1).flatten().tolist() == [10, 10]


def test_the_block_mask_waits_for_no_device():
    rows = rows_of([[200, 100], [280]], 300)
    watch = Watch()
    watch.on_train_batch_start()
    mask_of(rows, None)
    watch.on_train_batch_end()
    assert not watch.waits.found


# ---- what it computes ----------------------------------------------------------------------------------------------


def rollout(rows, q, k, v, slot_BU=None, branched=False):
    """[steps + 1, B, H, U, D]; ``branched``: every step in a branch of the context before it."""

    def picked(x_BHRD):
        return pick(x_BHRD.transpose(1, 2), slot_BU).transpose(1, 2)

    context, out = RolloutContext(rows, slot_BU), []
    for step in range(len(q)):
        context = context.branch() if branched else context
        keys = (k[step], v[step]) if step == 0 else (picked(k[step]), picked(v[step]))
        (context.own if step else context.native)(picked(q[step]), *keys)
        out.append(context.attend(picked(q[step])))  # a second question to the same keys
    return torch.stack(out), picked


@settings(max_examples=40, deadline=None)
@given(
    layouts,
    st.integers(0, 3),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([1, 0.6]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_values_and_gradients_equal_the_oracle(lengths, steps, heads, share, branched, seed):
    """Packed, padded and single segments, all rows or some, grouped heads, 0 to 3 draft steps, float64."""
    rows = rows_of(lengths, max(sum(x) for x in lengths) + 1)
    slot_BU = some_slots(rows, share, seed)
    qkv = random_qkv(rows, steps, *heads, seed=seed)
    legal = pick(rows.legal_BR, slot_BU)[None, :, None, :, None]
    with flex_everywhere():
        ours, picked = rollout(rows, *qkv, slot_BU, branched)
        ours = torch.where(legal, ours, 0)
        weight = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        mine = torch.autograd.grad((ours * weight).sum(), qkv)
    whole = dense_rollout_attention(rows, *qkv)
    oracle = torch.where(legal, torch.stack([picked(x) for x in whole]), 0)
    torch.testing.assert_close(ours, oracle, rtol=1e-10, atol=1e-12)
    for grad, exact in zip(mine, torch.autograd.grad((oracle * weight).sum(), qkv), strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lengths", [[[130]], [[100, 200], [170, 60, 30], [257]], [[256, 2], [129, 129]]])
def test_lengths_around_the_block_size_equal_the_usual_path(lengths, dtype):
    rows = rows_of(lengths, max(sum(x) for x in lengths))
    for share in (1, 0.5):
        slot_BU = some_slots(rows, share, 0)
        qkv = [x.detach().to(dtype).requires_grad_() for x in random_qkv(rows, 2)]
        found = []
        for path in (flex_everywhere, contextlib.nullcontext):
            with path():
                out, _ = rollout(rows, *qkv, slot_BU)
                found.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
        bound = 1e-5 if dtype == torch.float32 else 1e-12
        for ours, usual in zip(*found, strict=True):
            assert (ours - usual).abs().max() <= bound * usual.abs().max()


def test_gradcheck_of_the_merge():
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 3, 5), (2, 4, 3), (2, 4, 3, 5), *[(2, 2, 3, 5)] * 4]
    inputs = [torch.randn(x, dtype=torch.float64, generator=g, requires_grad=True) for x in shapes]
    assert torch.autograd.gradcheck(flex._Merged.apply, inputs)


def test_large_own_scores_do_not_overflow():
    out, q = torch.zeros(1, 1, 2, 1), torch.full((1, 1, 2, 1), 100.0)
    for sign, expected in ((1.0, 7.0), (-1.0, 0.0)):
        key, value = torch.full((1, 1, 2, 1), sign * 100.0), torch.full((1, 1, 2, 1), 7.0)
        merged = flex._Merged.apply(out, torch.zeros(1, 1, 2), q, key, value)
        torch.testing.assert_close(merged, torch.full_like(merged, expected))


# ---- in training ---------------------------------------------------------------------------------------------------

CASES = [
    (EagleModule, {}),
    (HassModule, {"passes": 3}),
    (HassModule, {"passes": 3, "detach": False}),
    (Eagle3Module, {"steps": 4}),
    (Eagle3Module, {"steps": 4, "checkpoint_steps": True}),
]


@pytest.mark.parametrize("layout", [((24, 19), (40,)), ((31,), (22,))], ids=["packed", "padded"])
@pytest.mark.parametrize(("kind", "more"), CASES, ids=lambda x: getattr(x, "variant", None) or "-".join(x))
def test_a_training_step_is_that_of_the_usual_path(kind, more, layout, monkeypatch):
    """Losses and gradients; the mask is made once per batch, whatever the passes, steps and recomputations."""
    target, batch = tiny_target(num_hidden_layers=8), make_batch(layout, answer_from=12)
    made = []
    monkeypatch.setattr(attention, "block_mask", lambda *args: made.append(args) or flex.block_mask(*args))
    found = []
    for path in (flex_everywhere, contextlib.nullcontext):
        torch.manual_seed(0)
        module = kind(target, OptimConfig(lr=1e-3), **more)
        with path():
            losses = []
            for one in module.passes(View.of(batch, target, module.taps)):
                one.loss.backward()
                losses.append(one.loss.detach())
        found.append((losses, [p.grad for p in module.network.parameters()]))
    assert len(made) == 1
    for ours, usual in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(ours, usual, rtol=1e-5, atol=0)
    for ours, usual in zip(found[0][1], found[1][1], strict=True):
        assert (ours - usual).abs().max() <= 1e-5 * usual.abs().max()


# ---- probation -----------------------------------------------------------------------------------------------------


def test_on_a_cpu_nothing_is_tried():
    q = torch.zeros(1, 4, 3, 64)
    assert not flex.flex_usable(q, q)
    assert not flex.flex_kernel(4, 4, 64).verdicts


def test_it_is_meant_for_cuda_and_for_heads_that_its_products_take():
    cuda = torch.device("cuda", 0)
    for width, dtype, meant in [
        (64, torch.bfloat16, True),
        (80, torch.float32, True),
        (16, torch.float16, True),
        (8, torch.bfloat16, False),
        (64, torch.float64, False),
    ]:
        assert flex.flex_kernel(4, 2, width).supports(cuda, dtype) == meant


@pytest.mark.parametrize("dtype", list(flex.BOUNDS))
def test_the_reference_passes_probation(dtype):
    with uncompiled():
        found = flex.flex_kernel(2, 1, 16).disagreement(torch.device("cpu"), dtype)
    assert found <= flex.BOUNDS[dtype]


@pytest.mark.parametrize("wrong", ["one key too many", "one key too few", "no gradient through the log-sum-exp"])
def test_a_wrong_kernel_fails_probation(wrong, monkeypatch):
    rightly, attend = flex.block_mask, flex._attend
    if wrong == "one key too many":
        monkeypatch.setattr(flex, "block_mask", lambda start, last, *sizes: rightly((start - 1).clamp(0), last, *sizes))
    elif wrong == "one key too few":
        monkeypatch.setattr(
            flex, "block_mask", lambda start, last, *sizes: rightly(start.minimum(last - 1) + 1, last, *sizes)
        )
    else:
        monkeypatch.setattr(flex, "_attend", lambda *args: (attend(*args)[0], attend(*args)[1].detach()))
    with uncompiled():
        found = flex.flex_kernel(2, 1, 16).disagreement(torch.device("cpu"), torch.float32)
    assert found > 2 * max(flex.BOUNDS.values())


@pytest.mark.parametrize("asked_in", [torch.inference_mode, torch.no_grad, contextlib.nullcontext])
def test_probation_works_wherever_it_is_asked_for(asked_in):
    with uncompiled(), asked_in():
        assert flex.flex_kernel(2, 1, 16).disagreement(torch.device("cpu"), torch.float32) <= 1e-4


def test_probation_inside_a_checkpointed_step_disturbs_nothing():
    asked, x = [], torch.ones(3, requires_grad=True)

    def step(x):
        if not asked:
            asked.append(flex.flex_kernel(2, 1, 16).disagreement(torch.device("cpu"), torch.float32))
        return x.square().exp()

    with uncompiled():
        checkpoint(step, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.e * torch.ones(3))


# ---- compiled ------------------------------------------------------------------------------------------------------


def attended(function, start_BR, slot_BU, **options):
    """Of random queries and keys, through ``function`` in the place of the uncompiled one."""
    g = torch.Generator().manual_seed(0)
    (B, R), U = start_BR.shape, slot_BU.shape[1]
    mask = flex.block_mask(start_BR.gather(1, slot_BU), slot_BU, B, R)
    q, k, v = (torch.randn(B, heads, n, 16, generator=g) for heads, n in ((4, U), (2, R), (2, R)))
    return function(q, k, v, block_mask=mask, enable_gqa=True, **options)


def packed_case(B, U, R):
    slot_BU = torch.stack(
        [torch.randperm(R, generator=torch.Generator().manual_seed(b))[:U].sort()[0] for b in range(B)]
    )
    return (torch.arange(R) // 90 * 90).expand(B, R).contiguous(), slot_BU


@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 3, 64)])
def test_the_graph_of_probation_serves_all_batches(heads, monkeypatch):
    """Two graphs: of one sequence and of several. Other lengths, masks, or every row asking compile nothing anew."""
    torch._dynamo.reset()
    graphs = []
    function = torch.compile(
        flex.flex_attention,
        dynamic=True,
        fullgraph=True,
        backend=lambda graph, _: graphs.append(graph) or graph.forward,
    )
    with uncompiled():
        monkeypatch.setattr(flex, "flex_attention", function)
        assert flex.flex_kernel(*heads).disagreement(torch.device("cpu"), torch.float32) <= 1e-4
        assert len(graphs) == 2
        H, G, D = heads
        for B, U, R in [(2, 300, 300), (3, 310, 400), (4, 200, 290), (5, 256, 256), (1, 160, 420)]:
            start_BR, slot_BU = packed_case(B, U, R)
            mask = flex.block_mask(start_BR.gather(1, slot_BU), slot_BU, B, R)
            shapes = (B, H, U, D), (B, G, R, D), (B, G, R, D)
            q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
            flex.flex_joint_attention(q, k, v, [], [], mask)
    assert len(graphs) == 2


@pytest.mark.slow
def test_inductor_compiles_the_forward():
    """The blocks that its kernel for the CPU, which has no backward, takes from the lists suffice."""
    torch._dynamo.reset()
    case = packed_case(2, 300, 400)
    with torch.no_grad():
        out = attended(torch.compile(flex.flex_attention, dynamic=False, fullgraph=True), *case)
        with uncompiled():
            torch.testing.assert_close(out, attended(flex.flex_attention, *case))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_cuda
@pytest.mark.parametrize("dtype", list(flex.BOUNDS))
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128), (3, 1, 80), (4, 2, 16)])
def test_it_passes_probation_on_cuda(heads, dtype):
    kernel = flex.flex_kernel(*heads)
    assert kernel.disagreement(torch.device("cuda", 0), dtype) <= kernel.bound(dtype)


@needs_cuda
@pytest.mark.parametrize("lengths", [[[700]], [[300, 500], [640, 100]], [[60]]])
def test_a_rollout_on_cuda_equals_that_on_the_cpu(lengths):
    rows = rows_of(lengths, max(sum(x) for x in lengths))
    qkv = [x.detach().float().requires_grad_() for x in random_qkv(rows, 2, D=32)]
    on_cuda = [x.detach().cuda().requires_grad_() for x in qkv]
    for share in (1, 0.5):
        slot_BU = some_slots(rows, share, 0)
        expected, _ = rollout(rows, *qkv, slot_BU)
        assert flex.flex_usable(on_cuda[0][0], on_cuda[1][0])
        out, _ = rollout(rows.to("cuda"), *on_cuda, None if slot_BU is None else slot_BU.cuda())
        torch.testing.assert_close(out.cpu(), expected, rtol=5e-3, atol=5e-3)
        grads = torch.autograd.grad(out.square().sum(), on_cuda)
        for mine, exact in zip(grads, torch.autograd.grad(expected.square().sum(), qkv), strict=True):
            assert (mine.cpu() - exact).abs().max() <= 5e-3 * exact.abs().max()


def test_first_keys_of_rows_never_fall():
    """What the block mask relies on, fillers included."""
    rows = rows_of([[200, 100], [280, 4]], 300)
    assert (first_seen(rows).diff(dim=1) >= 0).all()
