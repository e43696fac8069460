"""Rows that reach no loss are left out, and nothing else changes."""

import pytest
import torch

from eaglelab.data.needed import needed_rows
from eaglelab.variants import Eagle3Module, EagleModule, HassModule, OptimConfig, View
from tests.variants.conftest import make_batch, tiny_target

BATCHES = {
    "packed": ((24, 19), (40,), (9, 17, 15)),
    "padded": ((31,), (22,), (17,)),
    "single": ((40,),),
}
CASES = [
    (EagleModule, {"noise": "paper_uniform"}),
    (EagleModule, {"noise": "none", "labels": "hard"}),
    (HassModule, {"passes": 3, "pass_weights": [1.0, 0.5, 2.0]}),
    (HassModule, {"passes": 4, "detach": False}),
    (Eagle3Module, {"steps": 7}),
    (Eagle3Module, {"steps": 3, "draft_vocab_size": 40, "feature_weight": 0.5, "recurrence": "post_norm"}),
]


@pytest.fixture(scope="module")
def deep_target():
    return tiny_target(num_hidden_layers=8)


def build(kind, target, settings):
    torch.manual_seed(0)
    counts = torch.arange(target.vocab_size, 0, -1)
    return kind(target, OptimConfig(lr=1e-3), answer_counts=lambda: counts, **settings)


@pytest.mark.parametrize("layout", BATCHES)
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda x: getattr(x, "variant", None) or "-".join(x))
def test_losses_measures_and_gradients_are_those_of_all_rows(deep_target, kind, settings, layout):
    """Answers of a few tokens behind long prompts; and the MLP sees fewer rows."""
    batch = make_batch(BATCHES[layout], answer_from=12)
    found = {}
    for skips in (True, False):
        module = build(kind, deep_target, settings)
        module.skips_rows = skips
        (mlp,) = (part for name, part in module.network.named_modules() if name.endswith("mlp"))
        seen = []
        mlp.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape[1]))
        passes = []
        for one in module.passes(View.of(batch, deep_target, module.taps)):
            one.loss.backward()
            passes.append((one.loss.detach(), {k: float(v) for k, v in one.means.items()}))
        found[skips] = seen, passes, [p.grad for p in module.network.parameters()]
    rows = batch.rows.legal_BR.shape[1]
    assert set(found[False][0]) == {rows}
    assert max(found[True][0]) < rows
    for (loss, means), (whole_loss, whole_means) in zip(found[True][1], found[False][1], strict=True):
        torch.testing.assert_close(loss, whole_loss, rtol=1e-5, atol=0)
        assert means == pytest.approx(whole_means, rel=1e-5)
    for ours, whole in zip(found[True][2], found[False][2], strict=True):
        assert (ours - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_a_row_is_needed_when_a_step_of_its_chain_is_supervised():
    """Ten tokens, nine rows, answer from token 6: rows 5 to 8 are supervised, and step s lands s rows further on."""
    rows = make_batch(((10,),), answer_from=6).rows
    for steps, first in ((1, 5), (3, 3), (7, 0)):
        needed = needed_rows(rows, [rows.supervised_slots(step) for step in range(steps)])
        slots = range(9) if needed.slot_BU is None else needed.slot_BU[0].tolist()
        assert list(slots) == list(range(max(first, 0), 9))
        for m, landing in enumerate(needed.landing_M.tolist()):
            for step in range(steps):
                assert bool(needed.lands_MS[m, step]) == (landing - step >= 0)
                if landing >= step:
                    assert slots[int(needed.root_MS[m, step])] == landing - step


def test_steps_do_not_land_across_segments():
    """Two segments without prompts: the first rows of the second are reached by no root of the first."""
    rows = make_batch(((5, 5),), answer_from=1).rows
    needed = needed_rows(rows, [rows.supervised_slots(step) for step in range(4)])
    assert needed.landing_M.tolist() == list(range(8))
    assert needed.lands_MS.sum(1).tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize("layout", BATCHES)
@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_steps_land_on_rows_of_the_first_one(deep_target, layout, all_rows, labels):
    """Root ``r`` at step ``s`` lands on row ``r + s``, which step 0 looked up."""
    rows = make_batch(BATCHES[layout], answer_from=12).rows
    module = build(HassModule, deep_target, {"passes": 4, "labels": labels})
    module.skips_rows = not all_rows
    needed = module.needed(rows)
    for step in range(4):
        root_M = module.supervised(rows, step)
        assert len(needed.landed[step]) == len(root_M) > 0
        assert needed.landing_M[needed.landed[step]].equal(root_M + step)
