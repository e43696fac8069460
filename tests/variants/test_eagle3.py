"""EAGLE-3 against the pinned implementation's numbers, the sequential draft chain, and its maps."""

import types

import pytest
import torch
from torch.nn import functional as F

from eaglelab.data.draft_vocabulary import DraftVocabulary
from eaglelab.drafters import FusedDrafter
from eaglelab.variants import Eagle3Module, OptimConfig, View
from tests.oracles.golden import Golden
from tests.variants.conftest import make_batch, tiny_target


@pytest.fixture(scope="module")
def deep_target():
    return tiny_target(num_hidden_layers=8)


def eagle3(target, **settings) -> Eagle3Module:
    torch.manual_seed(0)
    counts = torch.arange(target.vocab_size, 0, -1)
    return Eagle3Module(target, OptimConfig(lr=1e-3), answer_counts=lambda: counts, **settings)


def test_golden_seven_steps():
    """Per-step losses, their 0.8^s sum and every gradient, with the published reduction and draft vocabulary."""
    golden = Golden("eagle3_train_s0")
    target = tiny_target(vocab_size=97, rms_norm_eps=1e-5, num_hidden_layers=8)
    module = eagle3(target, reduction="pinned", draft_vocab_size=40)
    weights = golden.group("w.")
    embedding = weights.pop("embed_tokens.weight")
    module.network.load_state_dict(weights, strict=True)
    stub = types.SimpleNamespace(
        embed=lambda ids: F.embedding(ids, embedding), lm_head=lambda logits: logits, max_positions=64
    )
    rows = golden.rows()
    view = View(rows, golden["in.input_ids"], rows.gather(golden["in.taps"]), golden["in.target_logits"], stub)

    losses, objective = [], module.objective
    module.objective = lambda *a: losses.append(objective(*a)) or losses[-1]
    (one,) = module.passes(view)
    for step, expected in enumerate(golden.facts["losses"]):
        assert losses[step][0].item() == pytest.approx(expected, rel=1e-5), step
    assert one.loss.item() == pytest.approx(golden.facts["total"], rel=1e-5)
    one.loss.backward()
    for name, parameter in module.network.named_parameters():
        torch.testing.assert_close(parameter.grad, golden[f"grad.{name}"], rtol=1e-5, atol=2e-6, msg=name)


def test_steps_equal_a_sequential_cached_draft_chain(deep_target):
    """Step s of root r is what decoding drafts from r: steps 1 to 7, 1e-5 of their scale, packed and padded."""
    module = eagle3(deep_target)
    states = []
    module.objective = lambda state, *_: states.append(state.detach()) or (state.sum(), {})
    lengths = ((9, 7), (12,))
    batch = make_batch(lengths)
    list(module.passes(View.of(batch, deep_target, module.taps)))
    assert len(states) == 7

    drafter = module.drafter()
    for b, row in enumerate(lengths):
        slot = start = 0
        for n in row:
            ids = batch.tokens_BS[b : b + 1, start : start + n]
            streams = deep_target.features(ids, module.taps)
            taps = torch.cat([streams[tap] for tap in module.taps], -1)
            for root in range(n - 1):
                slots, context = drafter.new_state(1, 32), root + 1
                positions = torch.arange(context)[None]
                hidden = drafter.extend(slots, taps[:, :context], ids[:, 1 : context + 1], positions)[:, -1:]
                for step in range(min(7, n - 1 - root)):
                    if step:
                        token = ids[:, root + 1 + step : root + 2 + step]
                        hidden = drafter.step(slots, hidden, token, torch.tensor([[root + step]]))
                    expected = hidden[0, 0]
                    error = (states[step][b, slot + root] - expected).abs().max() / expected.abs().max()
                    assert error < 1e-5, (root, step)
            slot, start = slot + n - 1, start + n


def test_masked_reduction_does_not_depend_on_padding(deep_target):
    short, padded = make_batch(((9,),)), make_batch(((9,),))
    for name in ("tokens_BS", "valid_BS", "segment_BS", "position_BS", "answer_BS"):
        value = getattr(padded, name)
        fill = -1 if name == "segment_BS" else 0
        setattr(padded, name, F.pad(value, (0, 20), value=fill))
    from eaglelab.data.rows import compile_rows

    padded.rows = compile_rows(padded.valid_BS, padded.segment_BS, padded.position_BS, padded.answer_BS)
    losses = {}
    for reduction in ("masked", "pinned"):
        module = eagle3(deep_target, reduction=reduction)
        pair = [View.of(batch, deep_target, module.taps) for batch in (short, padded)]
        losses[reduction] = [float(next(iter(module.passes(view))).loss) for view in pair]
    assert losses["masked"][0] == pytest.approx(losses["masked"][1], rel=1e-5)
    assert losses["pinned"][0] > 2 * losses["pinned"][1]


def test_gradient_flows_through_every_step(deep_target):
    """With all weight on the last step's loss, the fusion still learns."""
    module = eagle3(deep_target, decay=1.0)
    objective = module.objective

    def only_last(state, view, step):
        loss, means = objective(state, view, step)
        return (loss if step == 6 else loss * 0), means

    module.objective = only_last
    (one,) = module.passes(View.of(make_batch(((14,),)), deep_target, module.taps))
    one.loss.backward()
    assert module.network.fc.weight.grad.abs().max() > 0


def test_taps_are_the_published_addresses_and_never_collide(deep_target, target):
    assert eagle3(deep_target).taps == (2, 4, 5)
    assert eagle3(target, taps=[0, 1, 2]).taps == (0, 1, 2)
    with pytest.raises(ValueError, match="taps"):
        eagle3(target)  # three layers


def test_head_options(deep_target):
    module = eagle3(deep_target, head_init="target_rows", draft_vocab_size=10, train_head=False)
    ids = module.network.ids_K
    assert module.network.lm_head.weight.equal(deep_target.head_weight[ids])
    (one,) = module.passes(View.of(make_batch(), deep_target, module.taps))
    one.loss.backward()
    assert module.network.lm_head.weight.grad is None
    assert module.network.norm.weight.grad is not None


def test_rows_count_only_when_the_target_s_argmax_can_be_drafted(deep_target):
    module = eagle3(deep_target, draft_vocab_size=30)
    view = View.of(make_batch(((20,),)), deep_target, module.taps)
    (one,) = module.passes(view)
    best = deep_target.lm_head(view.teacher().flatten(0, 1)[view.rows.supervised_M]).argmax(-1)
    assert one.means["argmax_coverage"] == pytest.approx(float((best < 30).float().mean()))
    assert 0 < one.means["argmax_coverage"] < 1


def test_vocabulary_is_sorted_by_id_and_takes_the_most_frequent():
    counts = torch.tensor([5, 0, 9, 1, 9, 0, 2])
    vocabulary = DraftVocabulary.most_frequent(counts, 4)
    assert vocabulary.ids_K.tolist() == [0, 2, 4, 6]
    assert vocabulary.d2t.tolist() == [0, 1, 2, 3]  # offsets: 0+0, 1+1, 2+2, 3+3
    assert vocabulary.t2d.tolist() == [True, False, True, False, True, False, True]
    assert vocabulary.coverage(counts) == pytest.approx(25 / 26)
    assert DraftVocabulary.most_frequent(counts, 6).ids_K.tolist() == [0, 1, 2, 3, 4, 6]  # unseen: the lower id
    assert vocabulary.digest != DraftVocabulary.most_frequent(counts, 5).digest
    for size in (0, 8):
        with pytest.raises(ValueError, match="between 1 and"):
            DraftVocabulary.most_frequent(counts, size)
    with pytest.raises(ValueError, match="ascend"):
        DraftVocabulary(torch.tensor([3, 1]), 7)


@pytest.mark.parametrize(("damage", "message"), [("absolute", "absolute ids"), ("rebuilt", "one was replaced")])
def test_a_head_and_its_map_are_loaded_together_or_not_at_all(deep_target, damage, message):
    module = eagle3(deep_target, draft_vocab_size=10)
    module.network.d2t += 3
    module.network.t2d.copy_(F.pad(torch.zeros(3), (0, 58)).bool().index_fill(0, module.network.ids_K, True))
    state = {k: v.clone() for k, v in module.network.state_dict().items()}
    FusedDrafter(module.drafter_config).load_state_dict(state)  # consistent: fine
    state["d2t"] = module.network.ids_K if damage == "absolute" else state["d2t"] + 1
    with pytest.raises(ValueError, match=message):
        FusedDrafter(module.drafter_config).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "takes 1 to 10"),
        ({"steps": 11}, "takes 1 to 10"),
        ({"reduction": "mean"}, "reduction='mean' is not one of masked, pinned"),
        ({"head_init": "zeros"}, "head_init='zeros' is not one of random, target_rows"),
        ({"draft_vocab_size": 1000}, "between 1 and the target's vocabulary of 61"),
    ],
)
def test_settings_that_make_no_sense(settings, message, deep_target):
    with pytest.raises(ValueError, match=message):
        eagle3(deep_target, **settings)
