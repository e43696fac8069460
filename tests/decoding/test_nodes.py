"""The recorded trees of rounds against trees that are grown again, by hand, from the drafter's own scores."""

import pytest
import torch

from eaglelab.decoding import Chain, DynamicTree, Engine, StaticTree
from eaglelab.decoding.nodes import DROPPED
from eaglelab.decoding.policies.expansion import grow
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import ScriptDrafter, drafts, tiny_llama

VOCAB = 23
PROMPTS = [[7, 3, 5], [9, 4]]


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB, positions=96))


def rounds_of(target, tree, **settings):
    """(tokens before the round, record) of every round, and the drafter's scores."""
    predict = drafts("noisy", target.model, VOCAB)
    drafter = ScriptDrafter(predict, [prompt[0] for prompt in PROMPTS])
    engine = Engine(target, drafter, tree, record_nodes=True)
    found = []
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, stop_ids=set(), **settings), strict=True):
        published = [*prompt, result.tokens[0]]
        for record in result.rounds:
            found.append((tuple(published), record))
            published += record.published_tokens
        assert published == prompt + result.tokens
    return found, predict


def path(tokens, parents, row):
    return () if row == 0 else (*path(tokens, parents, parents[row - 1]), tokens[row - 1])


@pytest.mark.parametrize("budget", [1, 5, 12, 39])
def test_a_grown_tree_and_what_it_dropped(target, budget):
    width, depth = 3, 5
    found, predict = rounds_of(target, DynamicTree(width, depth, budget), max_new_tokens=14, batch=2)
    for before, record in found:
        told = record.to_dict()
        assert told["root_token"] == before[-1]
        if not record.drafted:
            assert told["node_token"] == told["dropped_token"] == []
            continue
        asked = set()

        def expand(nodes, before=before, asked=asked):
            for node in nodes:
                asked.add(node.path)
                p_V, ids_V = predict((*before, *node.path)).float().softmax(-1).topk(width)
                yield from ((node, token, float(p)) for p, token in zip(p_V, ids_V.tolist(), strict=True))

        best = grow(expand, width=width, depth=min(depth, budget), budget=10**6)
        tokens = told["node_token"] + told["dropped_token"]
        parents = told["node_parent"] + told["dropped_parent"]
        confidence = told["confidence"] + told["dropped_confidence"]
        paths = [path(tokens, parents, row) for row in range(1, len(tokens) + 1)]
        values = {node.path: node.value for node in best}
        kept, dropped = paths[: record.drafted], paths[record.drafted :]
        assert set(kept) == {node.path for node in best[:budget]}
        assert dropped == [node.path for node in best[budget : budget + DROPPED]]
        assert confidence == pytest.approx([torch.tensor(values[one]).exp().item() for one in paths], rel=1e-4)
        assert told["node_forwarded"] == [one in asked for one in kept]


@pytest.mark.parametrize("tree", [Chain(4), StaticTree(), DynamicTree(3, 4, 9)])
def test_the_accepted_path_is_what_was_published(target, tree):
    found, _ = rounds_of(target, tree, max_new_tokens=24, batch=2)
    for before, record in found:
        told = record.to_dict()
        rows = [row for row, accepted in enumerate(told["node_accepted"], start=1) if accepted]
        assert [told["node_token"][row - 1] for row in rows][: record.accepted] == record.published_tokens[
            : record.accepted
        ]
        assert [0, *rows[:-1]] == [told["node_parent"][row - 1] for row in rows] or not rows
        assert told["root_token"] == before[-1]
        if tree.name != "dynamic":
            with_children = {told["node_parent"][row] for row in range(record.drafted)}
            assert told["node_forwarded"] == [row in with_children for row in range(1, record.drafted + 1)]
            assert told["dropped_token"] == []


def test_nothing_is_kept_unasked(target):
    drafter = ScriptDrafter(drafts("noisy", target.model, VOCAB), PROMPTS[0][0])
    (result,) = Engine(target, drafter, Chain(3)).generate(PROMPTS[:1], max_new_tokens=6, stop_ids=set())
    assert all(record.nodes is None for record in result.rounds)
    assert "node_token" not in result.rounds[0].to_dict()
