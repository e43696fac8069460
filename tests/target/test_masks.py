"""The rules behind the masks, on hand-made cases."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from eaglelab.target.masks import MaskRule, segment_allowed

LOW = torch.finfo(torch.float32).min


def test_segments_see_their_own_past_and_padding_sees_itself() -> None:
    allowed_SS = segment_allowed(torch.tensor([[0, 0, 1, 1, -1, -1]]))[0].int()
    assert allowed_SS.tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_the_window_counts_positions_not_slots() -> None:
    rule = MaskRule.from_config(SimpleNamespace(sliding_window=2))
    assert not rule.keyed
    # Slots 0..2 are text; 3, 4, 5 are siblings at position 3; 6 is a child of slot 3.
    key_position_1K = torch.tensor([[0, 1, 2, 3, 3, 3, 4]])
    allowed_1QK = torch.tensor([[[1, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0, 1]]]).bool()
    mask = rule.additive(allowed_1QK, torch.tensor([[3, 4]]), key_position_1K, torch.float32)
    assert mask.shape == (1, 1, 2, 7)
    assert (mask[0, 0] == 0).int().tolist() == [[0, 0, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 1]]
    assert set(mask.unique().tolist()) == {0.0, LOW}


def test_chunks_are_blocks_of_positions() -> None:
    config = SimpleNamespace(layer_types=["chunked_attention", "full_attention"], attention_chunk_size=2)
    masks = MaskRule.from_config(config).additive(
        segment_allowed(torch.zeros(1, 4)), torch.arange(4)[None], torch.arange(4)[None], torch.float32
    )
    assert set(masks) == {"chunked_attention", "full_attention"}
    assert (masks["chunked_attention"][0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "'linear_attention'"),
        ({"is_causal": False}, "bidirectional"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_other_attention_is_refused(config: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MaskRule.from_config(SimpleNamespace(model_type="some", **config))
