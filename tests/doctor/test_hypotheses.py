"""A hypothesis undoes exactly the fault that it is named after: no training is needed to see that."""

import dataclasses

import pytest
import torch

from eaglelab.doctor import hypotheses_for
from eaglelab.doctor.examination import conversation_batch, examine
from eaglelab.doctor.wiring import LAST_STREAM, Wiring, read_streams
from eaglelab.drafters import DrafterConfig, FeatureDrafter, FusedDrafter, RolloutContext
from tests.doctor.planting import REARRANGED, other_revision, rearrange
from tests.variants.conftest import tiny_target

TOKENS = [7, 3, 11, 19, 2, 40, 40, 5, 23, 8, 31, 17]
FUSED = (2, 4, 5)


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=8)


def drafter(target, variant: str):
    """A random one, its norms far from one another."""
    torch.manual_seed(3)
    taps = FUSED if variant == "eagle3" else ("final",)
    kind = FusedDrafter if variant == "eagle3" else FeatureDrafter
    config = DrafterConfig.from_target(target.text_config, num_taps=len(taps))
    network = kind(config)
    for name, parameter in network.named_parameters():
        scale = 1.0 if "norm" in name else 0.3
        parameter.data = parameter.data * (parameter.data.abs() > 0) + scale * torch.randn_like(parameter)
    return network.eval(), target, taps


@torch.no_grad()
def chain(drafter, wiring: Wiring) -> list[torch.Tensor]:
    """Target ids by probability, best first, of three chained steps for every row."""
    network, target, _ = drafter
    batch = conversation_batch(TOKENS, 1)
    view = wiring.view(batch, target, read_streams(target, batch, set(wiring.taps)))
    wired, context = wiring.network(network), RolloutContext(batch.rows)
    state, found = wired.fuse(view.taps_BRF), []
    for step in range(3):
        attend = context.own if step else context.native
        state = wired(state, view.embedding(step), view.position(step), attend)
        found.append(wired.logits(state, target.lm_head))
    return found


def wiring_of(drafter, name: str) -> Wiring:
    network, target, taps = drafter
    return {one.name: one.wiring for one in hypotheses_for(network, target, taps)}[name]


def faults():
    for variant, names in REARRANGED.items():
        for name in names:
            if name == "other_target":
                continue
            if name.startswith("taps_") and name not in ("taps_lower", "taps_higher"):
                name = {"taps_9_6_2": "taps_5_4_2", "taps_6_9_2": "taps_4_5_2", "taps_2_9_6": "taps_2_5_4"}[name]
            yield variant, name


@pytest.mark.parametrize(("variant", "fault"), faults())
def test_the_named_hypothesis_undoes_the_fault(target, variant, fault):
    healthy = chain(drafter(target, variant), wiring_of(drafter(target, variant), "declared"))
    planted = rearrange(drafter(target, variant), fault)
    declared = chain(planted, wiring_of(planted, "declared"))
    named = chain(planted, wiring_of(planted, fault))
    assert all((one - other).abs().max() > 1e-2 for one, other in zip(declared, healthy, strict=True))
    for one, other in zip(named, healthy, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_another_revision_is_the_same_language_model_with_other_features(target):
    other = other_revision(target)
    tokens_BS = torch.tensor([TOKENS])
    torch.testing.assert_close(other.model(tokens_BS).logits, target.model(tokens_BS).logits, rtol=1e-4, atol=1e-4)
    first, second = (one.features(tokens_BS, ("final",))["final"] for one in (target, other))
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "token", "feature"), [("declared", 1, 0), ("token_late", 0, 0), ("token_early", 2, 0),
                                   ("feature_late", 1, -1), ("feature_early", 1, 1)],
)  # fmt: skip
def test_shifts_read_the_addresses_that_they_say(target, name, token, feature):
    one = drafter(target, "eagle")
    batch = conversation_batch(TOKENS, 1)
    streams = read_streams(target, batch, {"final"})
    view = wiring_of(one, name).view(batch, target, streams)
    for row in range(2, 8):
        for step in range(2):
            wanted = target.embed(torch.tensor(TOKENS[row + token + step]))
            assert view.embedding(step)[0, row].equal(wanted)
        assert view.taps_BRF[0, row].equal(streams["final"][0, row + feature])


@pytest.mark.parametrize(
    ("name", "by_step"), [("declared", [0, 1, 2]), ("positions_stay", [0, 0, 0]), ("positions_ahead", [0, 2, 3])]
)
def test_positions_of_draft_steps(target, name, by_step):
    one = drafter(target, "eagle")
    batch = conversation_batch(TOKENS, 1)
    view = wiring_of(one, name).view(batch, target, read_streams(target, batch, {"final"}))
    assert [int(view.position(step)[0, 4]) - 4 for step in range(3)] == by_step


def test_the_rows_of_a_wired_view_can_be_exchanged(target):
    """As HASS does, which notes on them which rows are needed."""
    one = drafter(target, "eagle")
    batch = conversation_batch(TOKENS, 1)
    for name in ("token_late", "positions_stay"):
        view = wiring_of(one, name).view(batch, target, read_streams(target, batch, {"final"}))
        other = dataclasses.replace(view, rows=batch.rows)
        assert other.embedding(1).equal(view.embedding(1))
        assert other.position(1).equal(view.position(1))


def test_the_stream_behind_the_last_layer_is_what_the_final_norm_reads(target):
    streams = read_streams(target, conversation_batch(TOKENS, 1), {LAST_STREAM, 7})
    assert target.final_norm(streams[LAST_STREAM]).equal(streams["final"])
    with torch.no_grad():
        assert not streams[7].equal(streams[LAST_STREAM])


@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_every_hypothesis_is_examined_and_the_network_stays_as_it_was(target, variant):
    network, target, taps = drafter(target, variant)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    hypotheses = hypotheses_for(network, target, taps)
    assert hypotheses[0].name == "declared"
    assert len(hypotheses) >= (13 if variant == "eagle" else 20)
    examined = examine(network, target, hypotheses, [(TOKENS, 1), (TOKENS[::-1], 2)], depth=2)
    assert examined.prefix_hits_HPK.shape == (len(hypotheses), 2, 2)
    assert (examined.prefix_hits_HPK <= examined.step_hits_HPK).all()
    assert all(network.state_dict()[name].equal(value) for name, value in before.items())
    assert type(network) in (FeatureDrafter, FusedDrafter)


def test_reduced_vocabulary_and_the_later_recurrence_have_hypotheses_of_their_own(target):
    config = DrafterConfig.from_target(target.text_config, num_taps=3, draft_vocab_size=20, recurrence="post_norm")
    names = {one.name for one in hypotheses_for(FusedDrafter(config), target, FUSED)}
    assert {"map_missing", "recurrence_pre_norm"} <= names
    assert "head_without_norm" not in names
    plain = dataclasses.replace(config, draft_vocab_size=None, recurrence="pre_norm")
    names = {one.name for one in hypotheses_for(FusedDrafter(plain), target, FUSED)}
    assert {"recurrence_post_norm", "head_without_norm"} <= names
    assert "map_missing" not in names


def test_answers_shorter_than_the_chain_are_refused(target):
    network, target, taps = drafter(target, "eagle")
    with pytest.raises(ValueError, match="no answer is longer than 5 tokens"):
        examine(network, target, hypotheses_for(network, target, taps), [(TOKENS[:4], 2)], depth=5)
