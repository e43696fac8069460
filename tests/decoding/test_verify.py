"""Greedy acceptance, against a walk from node to node."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglelab.decoding.tree import Topology, Tree
from eaglelab.decoding.verify import Decision, check_chosen, follow


def walk(tokens, parents, best):
    """Follow the target's choice from the root down. Returns rows and published tokens."""
    row, rows, published = 0, [0], []
    while True:
        published.append(best[row])
        matches = [r for r in range(1, len(tokens)) if parents[r - 1] == row and tokens[r] == best[row]]
        if not matches:
            return rows, published
        (row,) = matches
        rows.append(row)


@st.composite
def trees(draw, vocab=3):
    """Trees over three tokens with distinct siblings: equal tokens at many nodes."""
    used, parents, tokens = {}, [], [draw(st.integers(0, vocab - 1))]
    for row in range(1, draw(st.integers(1, 13))):
        parent = draw(st.integers(0, row - 1))
        free = [t for t in range(vocab) if t not in used.setdefault(parent, set())]
        if not free:
            break
        token = draw(st.sampled_from(free))
        used[parent].add(token)
        parents.append(parent)
        tokens.append(token)
    best = [draw(st.integers(0, vocab - 1)) for _ in tokens]
    return tokens, parents, best


def as_tree(tokens, parents):
    parent_BN = torch.tensor([parents], dtype=torch.int64)
    topology = Topology.from_parents(parent_BN, len(parents))
    nodes = torch.tensor([tokens[1:]], dtype=torch.int64)
    return Tree(nodes, torch.zeros(nodes.shape), topology).flatten(torch.tensor([tokens[:1]]))


@given(trees())
def test_longest_confirmed_path_over_three_tokens(case):
    tokens, parents, best = case
    logits_BRV = torch.nn.functional.one_hot(torch.tensor([best]), 3).float()
    host = follow(logits_BRV.argmax(-1), as_tree(tokens, parents)).to_host()
    rows, published = walk(tokens, parents, best)
    assert host.rows == [rows]
    assert host.published == [published]


@given(st.lists(trees(), min_size=2, max_size=4))
def test_sequences_of_a_batch_decide_alone(cases):
    size = min(len(tokens) for tokens, _, _ in cases)
    cases = [(t[:size], p[: size - 1], b[:size]) for t, p, b in cases]
    parent_BN = torch.tensor([p for _, p, _ in cases], dtype=torch.int64).reshape(len(cases), -1)
    topology = Topology.from_parents(parent_BN, size)
    tokens_BR = torch.tensor([t for t, _, _ in cases])
    nodes_BN = tokens_BR[:, 1:]
    flat = Tree(nodes_BN, torch.zeros(nodes_BN.shape), topology).flatten(tokens_BR[:, :1])
    best_BR = torch.tensor([b for _, _, b in cases])
    host = follow(best_BR, flat).to_host()
    for b, (tokens, parents, best) in enumerate(cases):
        assert (host.rows[b], host.published[b]) == walk(tokens, parents, best)


def test_ties_go_to_the_lowest_id():
    flat = as_tree([0, 1, 2], [0, 0])
    logits_BRV = torch.tensor([[[0.0, 4.0, 4.0], [1.0, 1.0, 1.0], [0.0, 0.0, 9.0]]])
    host = follow(logits_BRV.argmax(-1), flat).to_host()
    assert host.rows == [[0, 1]]
    assert host.published == [[1, 0]]


def test_publication_fixture_of_the_article():
    """Accepted flat rows [0, 2]; the frontier token is emitted apart from them."""
    flat = as_tree([7, 4, 5, 4], [0, 0, 1])
    logits_BRV = torch.nn.functional.one_hot(torch.tensor([[5, 4, 4, 0]]), 8).float()
    host = follow(logits_BRV.argmax(-1), flat).to_host()
    assert host.rows == [[0, 2]]
    assert host.published == [[5, 4]]  # 4 is also the token of rows 1 and 3


@pytest.mark.parametrize("tokens", [[-1], [5, -1], [-1, 5], [0, 3, -1, 2]])
def test_one_token_that_could_not_be_chosen_is_enough(tokens):
    """The others of a path or of a batch do not hide it."""
    with pytest.raises(FloatingPointError, match="no next token can be chosen"):
        check_chosen(tokens)


def test_a_negative_id_stops_a_decision_of_several_sequences():
    rows, published = torch.tensor([[0, 1], [0, 0]]), torch.tensor([[4, 7], [0, -1]])
    whole = Decision(torch.tensor([1, 0]), rows, published)
    assert whole.to_host().published == [[4, 7], [0]]
    with pytest.raises(FloatingPointError):
        Decision(torch.tensor([1, 1]), rows, published).to_host()
