"""The target's pass over a batch: in parts, and compiled."""

import functools
import os
from datetime import timedelta

import pytest
import torch
from torch._dynamo.utils import counters

from eaglelab.features.source import OnlineFeatures
from eaglelab.target import FINAL, FrozenTarget, frozen
from tests.target.target_families import FAMILIES, build
from tests.training.processes import free_port
from tests.variants.conftest import make_batch, tiny_target

LENGTHS = ((9, 7), (17,), (5,), (8, 4), (12,))


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9])
def test_passes_of_a_few_rows_are_the_pass_over_all(rows, monkeypatch):
    """Each row is planned by itself: some are one segment, some are not."""
    target, batch = tiny_target(), make_batch(LENGTHS)
    expected = OnlineFeatures(target).of(batch, (1, FINAL))
    source, sizes, features_of = OnlineFeatures(target, rows), [], target.features_of
    monkeypatch.setattr(
        target,
        "features_of",
        lambda plan, taps, **rest: sizes.append(len(plan.tokens_BS)) or features_of(plan, taps, **rest),
    )
    found = source.of(batch, (1, FINAL))
    assert sum(sizes) == 5
    assert max(sizes) == min(rows, 5)
    for tap in (1, FINAL):
        torch.testing.assert_close(found.streams[tap][batch.valid_BS], expected.streams[tap][batch.valid_BS])
    torch.testing.assert_close(found.teacher_BSw[batch.valid_BS], expected.teacher_BSw[batch.valid_BS])


def rows_of(rank):
    """The last batch of an epoch is dealt unevenly."""
    return make_batch(LENGTHS[:3] if rank else LENGTHS[3:])


def worker(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    target = tiny_target()
    target.shard("cpu")
    source = OnlineFeatures(target, 1)
    torch.save([source.of(rows_of(rank), (1, FINAL)).streams for _ in range(2)], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_that_share_a_target_make_equally_many_passes(tmp_path):
    """Three rows on one of them and two on the other."""
    torch.multiprocessing.spawn(worker, (free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        expected = OnlineFeatures(tiny_target()).of(rows_of(rank), (1, FINAL)).streams
        for found in torch.load(tmp_path / f"{rank}.pt"):
            for tap in (1, FINAL):
                valid_BS = rows_of(rank).valid_BS
                torch.testing.assert_close(found[tap][valid_BS], expected[tap][valid_BS])


def test_processes_are_asked_once_for_all_parts(monkeypatch):
    asked, target = [], tiny_target()
    monkeypatch.setattr(frozen, "passes_missing", lambda layer, passes, device: asked.append(passes) or 2)
    run, passes = target._features, []
    monkeypatch.setattr(target, "_features", lambda *args: passes.append(args[0].shape) or run(*args))
    OnlineFeatures(target, 2).of(make_batch(LENGTHS), (FINAL,))
    assert asked == [3]
    assert [len(shape) and shape[0] for shape in passes] == [2, 2, 1, 1, 1]


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
