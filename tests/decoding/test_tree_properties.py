"""What must hold for any tree: its maps, and that the target's tree forward is one forward per path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eaglelab.decoding import Topology, Tree
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import tiny_llama

VOCAB, PROMPT = 61, [5, 9, 44, 2, 17]


@pytest.fixture(scope="module")
def target():
    return FrozenTarget(tiny_llama(VOCAB))


@st.composite
def forests(draw, most=12):
    """Parent rows [B, N] and tokens [B, R] of up to three trees of equally many nodes."""
    B, N = draw(st.integers(1, 3)), draw(st.integers(1, most))
    parents = [[draw(st.integers(0, row)) for row in range(N)] for _ in range(B)]
    tokens = [[draw(st.integers(0, VOCAB - 1)) for _ in range(N + 1)] for _ in range(B)]
    return parents, tokens


def flat_of(parents, tokens):
    parent_BN, tokens_BR = torch.tensor(parents), torch.tensor(tokens)
    topology = Topology.from_parents(parent_BN, parent_BN.shape[1])
    return Tree(tokens_BR[:, 1:], torch.zeros(parent_BN.shape), topology).flatten(tokens_BR[:, :1])


def tree_logits(target, flat):
    """Logits and final features of the flat rows behind the prompt."""
    B = flat.tokens_BR.shape[0]
    cache = target.new_cache(B, len(PROMPT) + flat.rows)
    target.forward_rows(torch.tensor([PROMPT] * B), None, cache, logits="last")
    cache.commit(None, [len(PROMPT)] * B)
    position_BR = len(PROMPT) + flat.topology.depth_BR
    out = target.forward_rows(flat.tokens_BR, position_BR, cache, ancestor_BNN=flat.mask_BRR, taps=("final",))
    return out.logits_BNV, out.features["final"]


def path_logits(target, tokens):
    with torch.no_grad():
        out = target.model(torch.tensor([PROMPT + tokens]), use_cache=False, output_hidden_states=True)
    return out.logits[0, -1], out.hidden_states[-1][0, -1]


@given(forests())
def test_the_mask_is_the_closure_of_the_parents(forest):
    """Ancestry is reachability: powers of the parent relation, without walking."""
    parents, tokens = forest
    tree = flat_of(parents, tokens).topology
    R = tree.rows
    for b, line in enumerate(parents):
        reach = torch.eye(R)
        for row, parent in enumerate(line, start=1):
            reach[row, parent] = 1
        closure = torch.linalg.matrix_power(reach.double(), R) > 0
        assert torch.equal(tree.ancestor_BRR[b], closure)
        assert torch.equal(tree.depth_BR[b], closure.sum(1) - 1)
        assert torch.equal(tree.leaf_BR[b], closure.sum(0) == 1)


@given(forests())
def test_paths_start_at_the_root_and_follow_the_parents(forest):
    tree = flat_of(*forest).topology
    step_BRL = torch.arange(tree.path_BRL.shape[-1])
    assert (tree.path_BRL[..., 0] == 0).all()
    real_BRL = step_BRL <= tree.depth_BR[..., None]
    assert torch.equal(tree.path_BRL[~real_BRL], torch.arange(tree.rows)[None, :, None].expand_as(real_BRL)[~real_BRL])
    up_BRL = tree.parent_BR[:, None].expand(-1, tree.rows, -1).gather(2, tree.path_BRL)
    follows_BRL = up_BRL[..., 1:] == tree.path_BRL[..., :-1]
    assert follows_BRL[real_BRL[..., 1:]].all()
    last_BR = tree.path_BRL.gather(2, tree.depth_BR[..., None]).squeeze(-1)
    assert torch.equal(last_BR, torch.arange(tree.rows).expand_as(last_BR))


@settings(max_examples=25, deadline=None)
@given(forest=forests(most=9))
def test_a_tree_forward_is_one_forward_per_path(target, forest):
    parents, tokens = forest
    flat = flat_of(parents, tokens)
    logits_BRV, features_BRd = tree_logits(target, flat)
    for b in range(len(parents)):
        for row in range(flat.rows):
            rows = flat.topology.path_BRL[b, row, : flat.topology.depth_BR[b, row] + 1].tolist()
            logits, feature = path_logits(target, [tokens[b][r] for r in rows])
            torch.testing.assert_close(logits_BRV[b, row], logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(features_BRd[b, row], feature, rtol=1e-4, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(forest=forests(), data=st.data())
def test_the_order_of_nodes_does_not_matter(target, forest, data):
    """Any order that puts parents first, and so any order of siblings, gives every node the same logits."""
    parents, tokens = forest[0][0], forest[1][0]
    order = [0]
    while len(order) <= len(parents):
        free = [r for r in range(1, len(tokens)) if r not in order and parents[r - 1] in order]
        order.append(data.draw(st.sampled_from(free)))
    place = {row: i for i, row in enumerate(order)}
    moved = [place[parents[row - 1]] for row in order[1:]]
    straight, _ = tree_logits(target, flat_of([parents], [tokens]))
    permuted, _ = tree_logits(target, flat_of([moved], [[tokens[row] for row in order]]))
    torch.testing.assert_close(permuted[0], straight[0, order], rtol=1e-4, atol=1e-4)
