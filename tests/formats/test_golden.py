"""Published weights, written in the layout of their authors and imported, draft the trees that the authors recorded."""

import pytest
import torch

from eaglelab.decoding import DraftSeed, DynamicTree
from eaglelab.drafters import FeatureDrafter, FusedDrafter, SlotDrafter
from eaglelab.formats import import_drafter
from eaglelab.training.run_folder import RunFolder
from tests.formats.conftest import Published

CASES = [
    ("eagle2_draft_d3k4t16_s0", "bin"),
    ("eagle2_draft_d5k6t30_s0", "safetensors"),
    ("eagle3_draft_d3k4t16_s0", "bin"),
    ("eagle3_draft_d7k8t60_s0", "sharded"),
]


def imported(case, store, tmp_path):
    published = Published(case)
    target = published.load_target(tmp_path / "target")
    import_drafter(published.write(tmp_path / "published", store), target, tmp_path / "run")
    return published.golden, target, RunFolder.existing(tmp_path / "run")


def prefix(golden, fused):
    features = golden["in.taps" if fused else "in.features"]
    return features, golden["in.input_ids"], torch.arange(features.shape[1])[None]


def paths(tokens, parents):
    """Every node as the tokens from the root's child down to it."""
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent - 1], token) if parent > 0 else (token,))
    return set(found)


@pytest.mark.parametrize(("case", "store"), CASES)
def test_the_recorded_tree(case, store, tmp_path):
    golden, _, run = imported(case, store, tmp_path)
    facts = golden.facts
    drafter = run.load_drafter(run.load_target())
    policy = DynamicTree(width=facts["top_k"], depth=facts["depth"] + 1, budget=facts["total_tokens"] - 1)
    features, tokens, position = prefix(golden, case.startswith("eagle3"))
    n = features.shape[1]
    state = drafter.new_state(1, n + policy.max_step_rows)
    hidden = drafter.extend(state, features, tokens[:, 1:], position)
    tree = policy.draft(drafter, state, DraftSeed(hidden[:, -1:], torch.tensor([[n - 1]])))

    recorded = golden["out.draft_tokens"][0].tolist()
    depth = golden["out.tree_position_ids"].tolist()
    expected = set()
    for row in golden["out.tree_mask"][0, 0].bool()[1:]:
        seen = sorted(row.nonzero().flatten().tolist(), key=depth.__getitem__)
        expected.add(tuple(recorded[r] for r in seen[1:]))
    assert paths(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()) == expected


@pytest.mark.parametrize(("case", "store"), CASES)
def test_outputs_are_those_of_a_network_built_by_hand(case, store, tmp_path):
    golden, target, run = imported(case, store, tmp_path)
    fused = case.startswith("eagle3")
    weights = golden.group("w.")
    weights.pop("embed_tokens.weight")
    if fused:
        config = golden.drafter_config(fc_bias=False, num_taps=3, draft_vocab_size=golden.facts["draft_vocab_size"])
    else:
        config = golden.drafter_config()
    network = FusedDrafter(config) if fused else FeatureDrafter(config)
    network.load_state_dict(weights)
    by_hand = SlotDrafter(network, target, run.manifest().taps)
    ours = run.load_drafter(target)
    features, tokens, position = prefix(golden, fused)
    outputs = []
    for drafter in (by_hand, ours):
        hidden = drafter.extend(drafter.new_state(1, 64), features, tokens[:, 1:], position)
        outputs.append((hidden, drafter.log_probs(hidden), drafter.to_target_ids(torch.arange(40))))
    for expected, got in zip(*outputs, strict=True):
        assert torch.equal(expected, got)
    assert run.manifest().taps == ((2, 4, 5) if fused else ("final",))
