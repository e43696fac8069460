"""A target spread over two processes says what the whole one says."""

import os

import pytest
import torch

from eaglelab.target import FrozenTarget
from tests.training.test_measures import free_port
from tests.variants.conftest import tiny_target


def answers(target: FrozenTarget) -> dict:
    tokens_BS = torch.arange(24).view(2, 12) % target.vocab_size
    return target.features(tokens_BS, (1, "final"))


def kept(target: FrozenTarget) -> int:
    """Weights of the decoder layers that lie on this process."""
    layers = [p for name, p in target.model.named_parameters() if ".layers." in name]
    return sum(getattr(p, "_local_tensor", p).numel() for p in layers)


def worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    target = tiny_target()
    whole = kept(target)
    target.shard("cpu")
    target.assert_frozen()
    found = {"answers": answers(target), "share": kept(target) / whole, "weights": target.fingerprint.weights}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_hold_half_each_and_agree_with_the_whole(tmp_path):
    torch.multiprocessing.spawn(worker, (free_port(), str(tmp_path)), nprocs=2)
    whole = tiny_target()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["share"] == pytest.approx(0.5, abs=0.02)
        assert found["weights"] == whole.fingerprint.weights
        for tap, feature_BSd in answers(whole).items():
            assert found["answers"][tap].equal(feature_BSd), tap


def test_one_process_has_nothing_to_share(tmp_path):
    with pytest.raises(ValueError, match="sharded over several processes, and there is one"):
        tiny_target().shard("cpu")
