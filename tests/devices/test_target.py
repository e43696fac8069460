"""Every family's features on a device that is not the host."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

from eaglelab.target import FINAL, FrozenTarget
from tests.devices import pretended
from tests.target.target_families import FAMILIES, VOCAB, build

TAPS = (0, 2, FINAL)
MAKES_MASKS = ("gemma2", "gpt_oss")
"""Eager attention: earlier releases of the library copy a number to the device for each mask."""


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_sequences_and_packed_ones(family, device):
    """Plain rows (no mask, a cache that keeps nothing) longer than the window of the sliding families, and segments."""
    no_questions = {"pad_token_id": None} if family == "gpt2" else {}  # or every pass looks for padding
    target = FrozenTarget(build(family, **no_questions))
    there = FrozenTarget(copy.deepcopy(target.model))
    there.to(device)
    tokens_BS = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))
    packed_BS = torch.tensor([[0] * 7 + [1] * 6, [0] * 11 + [-1] * 2])
    for segment_BS in (None, packed_BS):
        plan = target.plan_sequences(tokens_BS, segment_BS=segment_BS)
        expected = target.features_of(plan, TAPS)
        moved = plan.to(device, non_blocking=True)
        there.features_of(moved, TAPS)  # what a model makes at its first use
        with pretended.counting() as waits:
            found = there.features_of(moved, TAPS)
        if family not in MAKES_MASKS or Version(transformers.__version__) >= Version("5.24"):
            assert waits == []
        for tap in TAPS:
            torch.testing.assert_close(found[tap].cpu(), expected[tap], rtol=1e-4, atol=1e-5)
