"""The target's pass over a batch: in parts, and compiled."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from eaglelab.features.source import OnlineFeatures
from eaglelab.target import FINAL, FrozenTarget
from tests.target.target_families import FAMILIES, build
from tests.variants.conftest import make_batch, tiny_target

LENGTHS = ((9, 7), (17,), (5,), (8, 4), (12,))


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9])
def test_passes_of_a_few_rows_are_the_pass_over_all(rows, monkeypatch):
    """Each row is planned by itself: some are one segment, some are not."""
    target, batch = tiny_target(), make_batch(LENGTHS)
    expected = OnlineFeatures(target).of(batch, (1, FINAL))
    source, sizes, features_of = OnlineFeatures(target, rows), [], target.features_of
    monkeypatch.setattr(
        target, "features_of", lambda plan, taps: sizes.append(len(plan.tokens_BS)) or features_of(plan, taps)
    )
    found = source.of(batch, (1, FINAL))
    assert sum(sizes) == 5
    assert max(sizes) == min(rows, 5)
    for tap in (1, FINAL):
        torch.testing.assert_close(found.streams[tap][batch.valid_BS], expected.streams[tap][batch.valid_BS])
    torch.testing.assert_close(found.teacher_BSw[batch.valid_BS], expected.teacher_BSw[batch.valid_BS])


def test_no_row_at_a_time_is_refused():
    with pytest.raises(ValueError, match="features.rows=0.*null for all"):
        OnlineFeatures(tiny_target(), 0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_compiled_layers_give_the_same_features(family, monkeypatch):
    """With taps between them; one graph for all layers of a kind, however many there are."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    counters.clear()
    target = FrozenTarget(build(family, **({} if "layer_types" in FAMILIES[family][2] else {"num_hidden_layers": 9})))
    tokens_BS = torch.randint(3, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    segment_BS = torch.tensor([[0] * 9 + [1] * 11, [0] * 20])
    asked = [{"segment_BS": None}, {"segment_BS": segment_BS}]
    expected = [target.features(tokens_BS, (1, 2, FINAL), **one) for one in asked]
    target.compile_layers()
    for one, features in zip(asked, expected, strict=True):
        found = target.features(tokens_BS, (1, 2, FINAL), **one)
        for tap, stream in features.items():
            torch.testing.assert_close(found[tap], stream)
    kinds = 2 if family == "gemma3" else 1
    assert 1 <= counters["stats"]["unique_graphs"] <= 2 * kinds
    torch._dynamo.reset()
