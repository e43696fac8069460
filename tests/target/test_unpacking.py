"""Long packed rows: the same features, segment by segment, without a mask of all pairs."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from eaglelab.target import sequences
from eaglelab.target.inputs import positions_of
from eaglelab.target.masks import MaskRule
from eaglelab.target.unpacking import _spans, unpack
from tests.target.target_families import FAMILIES, VOCAB, target_of
from tests.training.processes import free_port
from tests.variants.conftest import tiny_target

TAPS = (0, 2, "final")
LENGTHS = [[9, 4, 7], [12, 1, 8]]


def packed(lengths=LENGTHS, S: int = 24) -> torch.Tensor:
    segment_BS = torch.full((len(lengths), S), -1)
    for b, row in enumerate(lengths):
        segment_BS[b, : sum(row)] = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
    return segment_BS


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_of_the_masked_row(family: str) -> None:
    target, segment_BS = target_of(family), packed()
    tokens_BS = torch.randint(VOCAB, segment_BS.shape, generator=torch.Generator().manual_seed(0))
    masked = target.features(tokens_BS, TAPS, segment_BS=segment_BS)
    with patch.object(sequences, "MASKED_LENGTH", 0), patch.object(MaskRule, "additive", side_effect=AssertionError):
        unpacked = target.features(tokens_BS, TAPS, segment_BS=segment_BS)
    valid_BS = segment_BS >= 0
    for tap in TAPS:
        torch.testing.assert_close(unpacked[tap][valid_BS], masked[tap][valid_BS], rtol=0, atol=1e-5)
        assert not unpacked[tap][~valid_BS].any()


def test_every_token_is_in_one_group_once() -> None:
    segment_BS = packed()
    groups = unpack(segment_BS, positions_of(segment_BS))
    assert groups is not None
    seen = torch.cat([group.address_GL.flatten()[group.place_T] for group in groups])
    assert sorted(seen.tolist()) == (segment_BS >= 0).flatten().nonzero().flatten().tolist()
    for group in groups:
        G, L = group.address_GL.shape
        lengths = torch.bincount(group.place_T // L, minlength=G)
        assert lengths.max() == L <= 2 * lengths.min()
        assert group.address_GL.numel() <= segment_BS.numel()


def test_groups_are_cut_by_length_and_by_room() -> None:
    assert _spans([100, 60, 49, 40, 30, 3], 160) == [(0, 1), (1, 3), (3, 5), (5, 6)]
    assert _spans([], 10) == []


@pytest.mark.parametrize(
    ("segment", "position"),
    [
        ([0, 0, 1, 1, 0], [0, 1, 0, 1, 2]),  # one segment in two runs
        ([0, 0, -1, 0, 0], [0, 1, 0, 2, 3]),  # a hole
        ([0, 0, 0, 1, 1], [4, 5, 6, 0, 1]),  # starts in the middle
        ([0, 0, 0, 1, 1], [0, 2, 3, 0, 1]),
        ([1, 1, 0, 0, 0], [0, 1, 0, 1, 2]),
    ],
)
def test_what_is_no_run_from_position_0_keeps_its_mask(segment: list[int], position: list[int]) -> None:
    assert unpack(torch.tensor([segment]), torch.tensor([position])) is None


def test_a_batch_of_padding_alone_has_no_group() -> None:
    segment_BS = torch.full((1, 4), -1)
    assert unpack(segment_BS, torch.zeros(1, 4, dtype=torch.long)) == []


UNEVEN = [[[8, 3, 1]], [[12]]]  # three groups of segments on one process, one plain pass on the other


def features_of(target, rank: int) -> torch.Tensor:
    tokens_BS = torch.arange(12)[None] % target.vocab_size
    with patch.object(sequences, "MASKED_LENGTH", 0):
        return target.features(tokens_BS, ("final",), segment_BS=packed(UNEVEN[rank], 12))["final"]


def worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    target = tiny_target()
    target.shard("cpu")
    torch.save([features_of(target, rank) for _ in range(2)], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_with_other_segments_wait_for_each_other(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        for found in torch.load(tmp_path / f"{rank}.pt"):
            torch.testing.assert_close(found, features_of(tiny_target(), rank))
