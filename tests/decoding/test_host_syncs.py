"""A round waits for the device once, when acceptance comes to the host.

What makes the host wait are a handful of tensor methods; every call of one during a round is counted. On a CPU nothing
waits, but the calls are the same ones.
"""

from collections import Counter

import pytest
import torch

from eaglelab.decoding import Engine, Sampling, make_tree
from eaglelab.target import inputs
from tests.variants.conftest import tiny_target
from tests.variants.test_manifest import build

WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")


@pytest.fixture
def waits(monkeypatch) -> Counter:
    """Calls of each waiting method."""
    found: Counter = Counter()
    monkeypatch.setattr(inputs, "check_tokens", lambda tokens, *rest: tokens)  # asked on CPUs only, where it is free

    def counting(name, method):
        def call(self, *args, **kwargs):
            found[name] += 1
            return method(self, *args, **kwargs)

        return call

    for name in WAITING:
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
    for name in ("nonzero", "equal"):
        monkeypatch.setattr(torch, name, counting(f"torch.{name}", getattr(torch, name)))
    return found


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=1)], ids=["greedy", "T=1"])
@pytest.mark.parametrize("tree", ["chain", "static", "dynamic", "sampled"])
def test_one_host_synchronisation_per_round(tree, sampling, waits):
    target = tiny_target(max_position_embeddings=256)  # close to the limit positions are checked
    engine = Engine(target, build(target, "eagle").drafter(), make_tree(tree))
    state = engine.start([[1, 2, 3], [4, 5, 6, 7]], max_new_tokens=24, sampling=sampling)
    for _ in range(4):
        waits.clear()
        engine.round(state)
        assert waits == {"tolist": 1}
