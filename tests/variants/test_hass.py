"""HASS against the pinned implementation's numbers, the sequential draft chain, and its identities."""

import types

import pytest
import torch
from torch.nn import functional as F

from eaglelab.variants import EagleModule, HassModule, OptimConfig, Pass, View
from tests.oracles.golden import Golden
from tests.variants.conftest import loader, make_batch, tiny_target
from tests.variants.reference import assert_same_gradients, chain_states, gradients
from tests.variants.test_eagle import trainer


def hass(target, **settings) -> HassModule:
    torch.manual_seed(0)
    return HassModule(target, OptimConfig(lr=1e-3), **settings)


def golden_view(golden) -> View:
    embedding, head = golden["w.embed_tokens.weight"], golden["head.weight"]
    target = types.SimpleNamespace(
        embed=lambda ids: F.embedding(ids, embedding), lm_head=lambda x: x @ head.T, max_positions=64
    )
    rows, features = golden.rows(), golden["in.features"]
    return View(rows, golden["in.input_ids"], rows.gather(features), features, target)


@pytest.mark.parametrize("case", ["masked_nopad", "masked_pad", "shipped_nopad"])
def test_golden_three_passes(case):
    """Every term of every pass, and every gradient of the sum of the passes; the published arithmetic too."""
    golden = Golden(f"hass_train_{case}_s0")
    module = hass(tiny_target(vocab_size=97, rms_norm_eps=1e-5), alignment=case.split("_")[0])
    weights = golden.group("w.")
    weights.pop("embed_tokens.weight")
    module.network.load_state_dict(weights, strict=True)

    for step, one in enumerate(module.passes(golden_view(golden))):
        expected = golden.facts["steps"][step]
        tail = f"/step{step}" if step else ""
        for name, key in (("regression", "loss_reg"), ("distillation", "loss_cls"), ("top_k", "loss_topk")):
            assert one.means[name + tail].item() == pytest.approx(expected[key], rel=1e-5), (step, name)
        one.loss.backward()
    assert step == 2
    for name, parameter in module.network.named_parameters():
        torch.testing.assert_close(parameter.grad, golden[f"grad.{name}"], rtol=1e-5, atol=2e-6, msg=name)


def test_passes_equal_a_sequential_cached_draft_chain(target):
    """Pass s of root r is step s of a chain that decoding would draft from r: 1e-5 in fp32, packed and padded."""
    module = hass(target, passes=3)
    predicted, module.skips_rows = [], False
    module.objective = lambda x, *rest, **kw: predicted.append(x.detach()) or Pass(x.sum(), [], {})
    lengths = ((9, 7), (12,))
    batch = make_batch(lengths)
    list(module.passes(View.of(batch, target, ("final",))))

    drafter = module.drafter()
    for b, row in enumerate(lengths):
        slot = start = 0
        for n in row:
            ids = batch.tokens_BS[b : b + 1, start : start + n]
            feature = target.features(ids, ("final",))["final"]
            for root in range(n - 1):
                slots = drafter.new_state(1, 32)
                context = root + 1
                positions = torch.arange(context)[None]
                hidden = drafter.extend(slots, feature[:, :context], ids[:, 1 : context + 1], positions)[:, -1:]
                for step in range(3):
                    if root + step >= n - 1:
                        break
                    if step:
                        token = ids[:, root + 1 + step : root + 2 + step]
                        hidden = drafter.step(slots, hidden, token, torch.tensor([[root + step]]))
                    ours = predicted[step][b, slot + root]
                    torch.testing.assert_close(ours, hidden[0, 0], rtol=1e-5, atol=1e-5)
            slot, start = slot + n - 1, start + n


def test_one_pass_without_top_k_is_eagle_1(target):
    batch = make_batch()
    results = []
    for make, settings in ((HassModule, {"passes": 1, "top_weight": 0.0}), (EagleModule, {})):
        torch.manual_seed(0)
        module = make(target, OptimConfig(lr=1e-3), noise="none", **settings)
        (one,) = module.passes(View.of(batch, target, ("final",)))
        one.loss.backward()
        results.append((one.loss.detach(), [p.grad for p in module.network.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize(("answer_from", "expected"), [(5, [5, 5, 5]), (1, [9, 8, 7])])
def test_supervision_moves_with_the_predicted_row(target, answer_from, expected):
    """A root before the answer counts at the step whose prediction lies in it.

    Rows 4..8 of ten tokens are supervised when the answer starts at token 5, and all their roots t - s exist; with an
    answer from token 1 rows 0 and 1 have no root at steps 1 and 2.
    """
    rows = make_batch(((10,),), answer_from=answer_from).rows
    assert [rows.supervised_slots(step).numel() for step in range(3)] == expected


def test_spliced_states_are_detached(target):
    """The gradient of pass 1 does not run through pass 0's output, but reaches the keys of both."""
    module = hass(target, passes=2)
    view = View.of(make_batch(), target, ("final",))
    passes = module.passes(view)
    next(passes).loss.backward()
    module.network.zero_grad()
    second = next(passes)
    second.loss.backward()  # pass 0's graph is gone: running through it would raise
    assert all(p.grad is not None for p in module.network.parameters())


@pytest.mark.parametrize("labels", ["soft", "hard"])
@pytest.mark.parametrize("detach", [True, False])
def test_gradients_are_those_of_plain_chains(target, detach, labels):
    """Detached or not, against autograd over chains written out root by root; the two settings differ."""
    lengths = ((9, 7), (12,))
    batch = make_batch(lengths)
    settings = {"passes": 3, "pass_weights": [1.0, 0.5, 2.0], "top_weight": 0.7, "top_k": 4}
    module = hass(target, detach=detach, labels=labels, **settings)
    view = View.of(batch, target, ("final",))
    assert module.num_passes == (3 if detach else 1)
    for one in module.passes(view):
        one.loss.backward()
    ours = [p.grad for p in module.network.parameters()]

    plain = {}
    for setting in (True, False):
        (states, tokens), loss = chain_states(module, batch, lengths, 3, detach=setting), 0.0
        for step, weight in enumerate(settings["pass_weights"]):
            teacher, counted, reached = view.teacher(step), view.rows.supervised_at(step), states[step]
            assert int(counted.sum()) == sum(bool(counted[key]) for key in reached) > 5
            rows = [key for key in reached if counted[key] and (labels == "soft" or key in tokens[step])]
            for key in rows:
                q = target.lm_head(teacher[key]).softmax(-1)
                log_p = target.lm_head(reached[key]).log_softmax(-1)
                top = q.topk(4)
                row = F.smooth_l1_loss(reached[key], teacher[key])
                row = row - 0.7 * (top.values * log_p[top.indices]).sum()
                row = row - 0.1 * ((q * log_p).sum() if labels == "soft" else log_p[tokens[step][key]])
                loss = loss + weight * row / len(rows)
        plain[setting] = gradients(module.network, loss)
    assert_same_gradients(ours, plain[detach])
    assert max((a - b).abs().max() / b.abs().max() for a, b in zip(*plain.values(), strict=True)) > 0.05


@pytest.mark.parametrize("detach", [True, False])
def test_passes_that_no_row_reaches_change_nothing(target, detach):
    """Three tokens have two rows: no chain of three steps lies in them."""
    view = View.of(make_batch(((3,), (3,)), answer_from=1), target, ("final",))
    found = []
    for passes in (2, 4):
        module = hass(target, passes=passes, detach=detach)
        for one in module.passes(view):
            one.loss.backward()
        found.append([p.grad for p in module.network.parameters()])
    assert module.supervised(view.rows, 2).numel() == 0 < module.supervised(view.rows, 1).numel()
    assert_same_gradients(*found)


def test_joined_passes_train_and_stay_eagle_1_first(target):
    module = hass(target, detach=False, eagle_share=0.5)
    before = [p.detach().clone() for p in module.network.parameters()]
    trainer(4).fit(module, loader([make_batch()] * 4))
    assert all(not p.equal(old) for p, old in zip(module.network.parameters(), before, strict=True))


def test_hard_labels_count_at_every_pass_only_where_the_token_exists(target):
    """Ten tokens, answer from token 3: rows 2..8; hard rows need x_{t+2}, so row 8 is none. Each pass moves along."""
    batch = make_batch(((10,),))
    view = View.of(batch, target, ("final",))
    counts = {}
    for labels in ("soft", "hard"):
        module = hass(target, labels=labels)
        counts[labels] = [module.supervised(view.rows, step).numel() for step in range(3)]
        for step, one in enumerate(module.passes(view)):
            assert {rows for _, rows in one.measures.values()} == {counts[labels][step]}
            assert one.means[f"top_k/step{step}" if step else "top_k"] > 0
    assert counts == {"soft": [7, 7, 7], "hard": [6, 6, 6]}


def test_eagle_share_is_eagle_1_first(target):
    module = hass(target, eagle_share=0.5)
    counts, passes = [], module.passes

    def counting(view):
        counts.append(0)
        for one in passes(view):
            counts[-1] += 1
            yield one

    module.passes = counting
    trainer(6).fit(module, loader([make_batch()] * 6))
    assert counts == [1, 1, 1, 3, 3, 3]


def test_shipped_arithmetic_refuses_packed_rows(target):
    passes = hass(target, alignment="shipped").passes(View.of(make_batch(), target, ("final",)))
    with pytest.raises(ValueError, match="set data.packing=false"):
        next(passes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"passes": 0}, "takes 1 to 5"),
        ({"passes": 6}, "takes 1 to 5"),
        ({"pass_weights": [1.0]}, "one weight for each of 3 passes"),
        ({"eagle_share": 1.0}, "must be in"),
        ({"labels": "soften"}, "labels='soften' is not one of soft, hard"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"alignment": "none"}, "alignment='none' is not one of masked, shipped"),
    ],
)
def test_settings_that_make_no_sense(settings, message, target):
    with pytest.raises(ValueError, match=message):
        hass(target, **settings)
