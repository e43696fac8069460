"""Simulated tau: an oracle scores exactly 1 + depth, and the count is the joint prefix."""

import pytest
import torch
from torch import nn

from eaglelab.variants import ChainSimulation, View
from tests.variants.conftest import eagle, make_batch


class Scripted(nn.Module):
    """A drafter that returns given states per step; ``wrong_from`` step on it points elsewhere."""

    def __init__(self, view, wrong=()):
        super().__init__()
        self.view, self.wrong, self.step = view, wrong, 0

    def head_input(self, state):
        return state

    def logits(self, state, target_head):
        return target_head(state)

    def to_target_ids(self, ids):
        return ids

    def fuse(self, taps):
        self.step = 0
        return taps

    def forward(self, state, embedding, position, attend):
        heads = attend(*(torch.zeros(state.shape[0], 1, state.shape[1], 4) for _ in range(3)))
        assert heads.isfinite().all()
        out = self.view.teacher(self.step)
        if self.step in self.wrong:
            out = -out
        self.step += 1
        return out


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_oracle_drafter_scores_exactly_one_plus_depth(target, depth):
    view = View.of(make_batch(((12, 10), (14,))), target, ("final",))
    chain = ChainSimulation(depth)
    for _ in range(2):  # over several batches
        chain.update(Scripted(view), view)
    measured = chain.compute()
    assert measured["tau"] == 1 + depth
    assert measured[f"feature_error@{depth}"] == 0


def test_hits_after_the_first_miss_do_not_count(target):
    view = View.of(make_batch(((12, 10), (14,))), target, ("final",))
    chain = ChainSimulation(4)
    chain.update(Scripted(view, wrong=(1,)), view)
    measured = chain.compute()
    assert measured["hit@1"] == 1
    assert measured["hit@2"] < 0.5
    assert measured["hit@3"] == 1
    assert measured["prefix@3"] == measured["prefix@2"] == measured["hit@2"]
    assert measured["tau"] == pytest.approx(2 + 3 * float(measured["hit@2"]))


def test_roots_are_those_whose_whole_chain_is_supervised(target):
    """Answer rows of a segment of n tokens, prompt of 3: roots 2..n-1-depth."""
    view = View.of(make_batch(((12,),)), target, ("final",))
    chain = ChainSimulation(4)
    chain.update(Scripted(view), view)
    assert chain.roots == 12 - 1 - 4 - 2 + 1
    none = View.of(make_batch(((5,),)), target, ("final",))
    short = ChainSimulation(4)
    short.update(Scripted(none), none)
    assert short.roots == 0
    assert short.compute()["tau"] == 1


def test_equals_a_sequential_cached_draft_chain(target):
    """The rollout that training and validation use is what decoding does, step by step: 1e-5 in fp32."""
    module = eagle(target)
    drafter = module.drafter()
    batch = make_batch(((11,),))
    view = View.of(batch, target, ("final",))
    ids = batch.tokens_BS[:, :11]
    features = target.features(ids, ("final",))["final"]

    states = []
    from eaglelab.drafters import RolloutContext

    context = RolloutContext(view.rows)
    state = module.network.fuse(view.taps_BRF)
    with torch.no_grad():
        for step in range(5):
            attend = context.own if step else context.native
            state = module.network(state, view.embedding(step), view.position(step), attend)
            states.append(state)

    for root in range(6):
        slots = drafter.new_state(1, 32)
        n = root + 1  # rows 0..root exist; row t reads f_t and x_{t+1}
        hidden = drafter.extend(slots, features[:, :n], ids[:, 1 : n + 1], torch.arange(n)[None])
        torch.testing.assert_close(hidden[:, -1], states[0][:, root], rtol=1e-5, atol=1e-5)
        hidden = hidden[:, -1:]
        for step in range(1, 5):
            token = ids[:, root + 1 + step : root + 2 + step]
            hidden = drafter.step(slots, hidden, token, torch.tensor([[root + step]]))
            torch.testing.assert_close(hidden[:, 0], states[step][:, root], rtol=1e-5, atol=1e-5)
        drafter.discard(slots)
        assert slots.lengths == [n] and slots.provisional == 0


def test_depth_must_be_positive():
    with pytest.raises(ValueError, match="at least 1"):
        ChainSimulation(0)
