"""Scripted acceptance on a device that is not the host."""

import pytest

from eaglelab.decoding import Engine
from eaglelab.evaluation.scripted import ScriptedDrafter
from eaglelab.target import FrozenTarget
from tests.decoding.test_exactness import network_drafter
from tests.devices import pretended
from tests.evaluation.test_round_speed import PROMPT, TREES
from tests.oracles.scripted import hf_greedy, tiny_llama


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_the_script_makes_nobody_wait(tree, device):
    """A round waits once for the device, as any does."""
    text = hf_greedy(tiny_llama(23, layers=3), PROMPT, 60)
    target = FrozenTarget(tiny_llama(23, layers=3)).to(device)
    drafter = network_drafter(target, "feature")
    drafter.network.to(device)
    scripted = ScriptedDrafter(drafter, [*PROMPT, *text], [3, 0, 1])
    engine = Engine(target, scripted, TREES[tree])
    state = engine.start([PROMPT], max_new_tokens=30, stop_ids=frozenset())
    engine.round(state)  # trees are moved to the device once
    found = []
    for _ in range(2):
        pretended.waits.clear()
        found += [record.accepted for record in engine.round(state)]
        assert len(pretended.waits) == 1, pretended.waits
    assert found == [0, 1]
