"""Sequences of 32,768 tokens: memory grows with the length, packed or not."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from eaglelab.data.packing import PackedRow, collate
from eaglelab.training.cost import Shape, _measure_peak, in_fresh_process, return_freed_blocks

NARROW = Shape(hidden_size=64, intermediate_size=128, num_layers=7, num_heads=2, vocab_size=256, batch=1)
VARIANTS: list[tuple[str, dict[str, Any]]] = [("eagle", {}), ("hass", {"passes": 2}), ("eagle3", {"steps": 2})]
SEGMENT = 600


def peak(variant: str, settings: dict[str, Any], length: int, segment: int) -> float:
    """MiB of one training step, in a process of its own."""
    shape = dataclasses.replace(NARROW, length=length, segments=max(1, length // segment))
    return in_fresh_process(_measure_peak, (variant, shape, settings, 1, 1), return_freed_blocks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("variant", "settings"), VARIANTS)
@pytest.mark.parametrize(
    ("lengths", "segment"),
    [((8192, 16384, 32768), SEGMENT), ((4096, 8192, 16384), 10**9)],
    ids=["packed", "one segment"],
)
def test_memory_is_linear_in_length(variant: str, settings: dict[str, Any], lengths, segment: int) -> None:
    """From 8,192 tokens to 32,768 in conversations of about 600. A mask of all pairs would be 4 GiB there."""
    one, two, four = (peak(variant, settings, length, segment) for length in lengths)
    assert four - two == pytest.approx(2 * (two - one), rel=0.05)
    assert four == pytest.approx(4 * one, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("variant", "settings"), VARIANTS)
def test_a_conversation_of_32768_tokens_trains_a_step(variant: str, settings: dict[str, Any]) -> None:
    per_token = peak(variant, settings, 8192, 10**9) / 8192
    assert peak(variant, settings, 32768, 10**9) == pytest.approx(32768 * per_token, rel=0.05)


def test_a_packed_row_of_32768_tokens_is_planned_without_pairs() -> None:
    """Collation and plan: what they build is linear in the length."""
    lengths = (*[SEGMENT] * 54, 368)
    row = PackedRow(np.arange(32768, dtype=np.int32) % 256, np.ones(32768, np.bool_), lengths)
    batch = collate([row], row_length=32768)
    assert batch.rows.legal_BR.shape == (1, 32768 - len(lengths))
    assert not batch.rows.causal
    assert sum(x.nbytes for x in vars(batch).values() if hasattr(x, "nbytes")) < 100 * 32768
