"""The target one batch early: the same training, one pass per batch, and each pass before the step it runs beside."""

import dataclasses
import itertools

import pytest
import torch

from eaglelab.data.loader import looking_ahead
from eaglelab.features.ahead import FeaturesAhead
from eaglelab.features.source import OnlineFeatures
from eaglelab.target import FINAL
from eaglelab.variants import VARIANTS
from tests.features.test_training import OnlineData, train
from tests.variants.conftest import make_batch, tiny_target


def ahead(target, variant, **switches):
    data = OnlineData(batch_size=2, supervise="advanced", seed=3, num_workers=0)
    data.looks_ahead = True
    return train(target, variant, data, FeaturesAhead(OnlineFeatures(target)), **switches)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_training_is_the_same(deep_target, variant):
    """Bit by bit, over the end of an epoch, with accumulation and validations in between."""
    data = OnlineData(batch_size=2, supervise="advanced", seed=3, num_workers=0)
    _, expected = train(deep_target, variant, data)
    _, losses = ahead(deep_target, variant)
    assert losses == expected
    assert len(losses) > 0


def test_batches_are_announced_and_the_last_one_follows_nothing():
    batches = [make_batch(seed=seed) for seed in range(4)]
    seen = list(looking_ahead(iter(batches)))
    assert [one.tokens_BS is two.tokens_BS for one, two in zip(seen, batches, strict=True)] == [True] * 4
    for one, after in itertools.pairwise(seen):
        assert one.following.ticket is after.ticket is not None
        assert one.following.following is None, "a batch would hold the whole epoch"
    assert seen[-1].following is None
    assert list(looking_ahead(iter([]))) == []


@pytest.fixture
def passes(monkeypatch):
    """The first token of every batch that the target is run over."""
    found = []
    features_of = OnlineFeatures.of

    def of(self, batch, taps):
        found.append(int(batch.tokens_BS[0, 0]))
        return features_of(self, batch, taps)

    monkeypatch.setattr(OnlineFeatures, "of", of)
    return found


def numbered(count):
    batches = [make_batch(seed=seed) for seed in range(count)]
    for number, batch in enumerate(batches):
        batch.tokens_BS[0, 0] = number
    return batches


def test_one_pass_per_batch_and_one_batch_early(passes):
    source = FeaturesAhead(OnlineFeatures(tiny_target()))
    after_each = []
    for batch in looking_ahead(iter(numbered(4))):
        source.of(batch, (FINAL,))
        after_each.append(list(passes))
    assert after_each == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_batch_that_was_passed_over_costs_its_pass_alone(passes):
    """One without supervised rows asks for nothing; what follows is not confused with it."""
    source = FeaturesAhead(OnlineFeatures(tiny_target()))
    first, _, third, fourth = looking_ahead(iter(numbered(4)))
    target = source.source.target
    for batch in (first, third, fourth):
        found = source.of(batch, (FINAL,))
        expected = target.features(
            batch.tokens_BS, (FINAL,), segment_BS=batch.segment_BS, position_BS=batch.position_BS
        )
        assert torch.equal(found.streams[FINAL], expected[FINAL])
    assert passes == [0, 1, 2, 3]


def test_other_batches_come_in_between(passes):
    """A validation between two steps leaves what was started for the next one."""
    source = FeaturesAhead(OnlineFeatures(tiny_target()))
    first, second = looking_ahead(iter(numbered(2)))
    source.of(first, (FINAL,))
    source.of(dataclasses.replace(numbered(9)[8], following=None), (FINAL,))
    source.of(second, (FINAL,))
    assert passes == [0, 1, 8]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_features_are_those_of_one_stream():
    target = tiny_target()
    target.to("cuda")
    source, plain = FeaturesAhead(OnlineFeatures(target)), OnlineFeatures(target)
    for batch in looking_ahead(iter(numbered(8))):
        moved = dataclasses.replace(batch, sequences=plain.plan(batch)).to("cuda", non_blocking=True)
        expected = plain.of(moved, (FINAL,)).streams[FINAL]
        assert torch.equal(source.of(moved, (FINAL,)).streams[FINAL], expected)
