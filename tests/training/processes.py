"""Trainings of two processes on this machine, and what they leave beside that of one."""

import os
import socket

import torch


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def be_process(rank: int, port: int) -> None:
    """Make this process one of two, as torchrun would; with one thread, so that sums have one order."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "test",
    }
    torch.set_num_threads(1)


def assert_close_as_a_whole(found, expected, share):
    """Largest difference within ``share`` of the largest number: small numbers carry the rounding of large ones."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= share * expected.abs().max()


def assert_same_training(one, two, before, *, weights, state):
    """Checkpoints of one form. AdamW's first step turns the rounding of tiny gradients into steps of its own size, so
    weights are compared by their mean.

    Args:
        one, two: checkpoints, of one process and of two.
        before: the state dict that both started with.
        weights: mean difference, as a share of how far the weights moved.
        state: largest difference of the optimizer's numbers, as a share of the largest.
    """
    assert one.keys() == two.keys()
    assert one["state_dict"].keys() == two["state_dict"].keys()
    for name, weight in one["state_dict"].items():
        found, moved = two["state_dict"][name].double(), (weight.double() - before[name].double()).abs().mean()
        assert (found - weight.double()).abs().mean() <= weights * moved, name
    first, second = one["optimizer_states"][0], two["optimizer_states"][0]
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for number, numbers in first["state"].items():
        assert numbers.keys() == second["state"][number].keys()
        for name, value in numbers.items():
            assert_close_as_a_whole(second["state"][number][name], value, state)
