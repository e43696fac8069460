"""Decoding on a device that is not the host: the same tokens, and one wait per round."""

import pytest
import torch
from packaging.version import Version

from eaglelab.decoding import Engine, Sampling, make_tree
from eaglelab.decoding import sampling as law
from tests.devices import pretended
from tests.variants.conftest import tiny_target
from tests.variants.test_manifest import build

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"), reason="inference mode refuses views of wrapped tensors"
)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [3, 3]]
LAWS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.0, top_p=0.9, seed=1),
    "penalty": Sampling(repetition_penalty=1.3),
}


@pytest.fixture(autouse=True)
def random_numbers_of_the_host(monkeypatch):
    """Generators of the pretended device do not exist; real ones are made and used without a wait."""
    rand, generator = torch.rand, torch.Generator

    def round_(self, place, device):
        return generator().manual_seed(self.seed * 1009 + place)

    def noise(generators, shape):
        where = pretended.start() if noise.on_device else torch.device("cpu")
        return torch.stack([rand(shape, generator=one) for one in generators]).to(where, non_blocking=True)

    noise.on_device = False
    monkeypatch.setattr(law.Stream, "round", round_)
    monkeypatch.setattr(law, "noise", noise)
    return noise


def engine(variant, tree, where, **settings):
    target = tiny_target(max_position_embeddings=256, num_hidden_layers=8 if variant == "eagle3" else 2)
    torch.manual_seed(3)
    module = build(target, variant)
    module.network.to(where)
    target.to(where)
    return Engine(target, module.drafter() if tree else None, make_tree(tree) if tree else None, **settings)


CASES = [
    ("eagle", None, "greedy"),
    *(("eagle", tree, "drawn") for tree in ("static", "dynamic", "sampled")),
    ("eagle", "chain", "penalty"),  # trees that branch wait once per level, see sampling.py
    ("eagle3", "dynamic", "greedy"),
]


@pytest.mark.parametrize(("variant", "tree", "sampling"), CASES)
def test_text_and_waits(variant, tree, sampling, device, random_numbers_of_the_host):
    """Two at a time, so that sequences join and leave. Each round waits once, for what was accepted."""
    arguments = {"max_new_tokens": 8, "stop_ids": (), "sampling": LAWS[sampling], "batch": 2}
    expected = engine(variant, tree, torch.device("cpu")).generate(PROMPTS, **arguments)
    there = engine(variant, tree, device)
    random_numbers_of_the_host.on_device = True
    there.generate(PROMPTS[:1], **arguments | {"max_new_tokens": 3})  # trees are moved to the device once
    waits = []

    def on_round(records):
        waits.append([wait for wait in pretended.waits if "prefill" not in wait])
        pretended.waits.clear()

    pretended.waits.clear()
    found = there.generate(PROMPTS, **arguments, on_round=on_round)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert {len(of_round) for of_round in waits} == {1}, waits
