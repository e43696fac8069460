"""Tree topology and the flat layout, against naive walks over parents."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaglelab.decoding.policies import STATIC_25, Chain, StaticTree, make_tree
from eaglelab.decoding.tree import Topology, Tree, parents_of_paths, root_only

# contracts.md section 6, typed in again on purpose
CONTRACT_25 = """
[0],[1],[2],[3]; [0,0],[0,1],[0,2],[1,0],[1,1],[2,0],[2,1],[3,0];
[0,0,0],[0,0,1],[0,0,2],[0,1,0],[0,1,1],[0,2,0],[0,2,1],[1,0,0];
[0,0,0,0],[0,0,0,1],[0,0,0,2]; [0,0,0,0,0],[0,0,0,0,1]
"""


@st.composite
def parent_lists(draw):
    """Random trees: node i (row i + 1) hangs below any earlier row."""
    count = draw(st.integers(0, 14))
    return [draw(st.integers(0, row)) for row in range(count)]


def lineage(parents, row):
    """Rows from the root down to `row`, by walking up."""
    rows = [row]
    while rows[0] != 0:
        rows.insert(0, parents[rows[0] - 1])
    return rows


@given(st.lists(parent_lists(), min_size=1, max_size=3))
def test_topology_is_what_walking_up_says(trees):
    size = min(len(parents) for parents in trees)
    trees = [parents[:size] for parents in trees]
    deepest = max(len(lineage(p, row)) - 1 for p in trees for row in range(size + 1))
    parent_BN = torch.tensor(trees, dtype=torch.int64).reshape(len(trees), size)
    topology = Topology.from_parents(parent_BN, deepest)
    for b, parents in enumerate(trees):
        for row in range(size + 1):
            line = lineage(parents, row)
            assert topology.depth_BR[b, row] == len(line) - 1
            assert topology.ancestor_BRR[b, row].nonzero().flatten().tolist() == sorted(line)
            path = topology.path_BRL[b, row].tolist()
            assert path == line + [row] * (deepest + 1 - len(line))
            assert topology.leaf_BR[b, row] == (row not in parents)


@given(parent_lists(), st.integers(0, 3))
def test_a_looser_depth_bound_only_pads(parents, slack):
    deepest = max(len(lineage(parents, row)) - 1 for row in range(len(parents) + 1))
    parent_BN = torch.tensor([parents], dtype=torch.int64)
    tight = Topology.from_parents(parent_BN, deepest)
    loose = Topology.from_parents(parent_BN, deepest + slack)
    assert torch.equal(tight.ancestor_BRR, loose.ancestor_BRR)
    assert torch.equal(tight.depth_BR, loose.depth_BR)
    assert torch.equal(tight.path_BRL, loose.path_BRL[..., : deepest + 1])


def test_default_static_tree_is_the_contract_list():
    rows = CONTRACT_25.replace("\n", "").replace(";", ",")
    contract = json.loads(f"[{rows}]")
    assert len(contract) == 25
    assert [list(path) for path in STATIC_25] == contract
    tree = StaticTree()
    assert (tree.max_nodes, tree.max_depth) == (25, 5)
    # parents by hand: rows of the 4 + 8 nodes of the first two levels
    assert tree.topology.parent_BR[0, :13].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4]
    assert tree.topology.depth_BR[0].bincount().tolist() == [1, 4, 8, 8, 3, 2]


def test_chain_is_a_tree_with_the_causal_mask():
    chain = Chain(4)
    assert torch.equal(chain.topology.ancestor_BRR[0], torch.ones(5, 5).tril().bool())
    assert chain.topology.path_BRL[0, 2].tolist() == [0, 1, 2, 2, 2]
    flat = Tree(torch.tensor([[5, 5, 6, 5]]), torch.zeros(1, 4), chain.topology).flatten(torch.tensor([[9]]))
    assert flat.tokens_BR.tolist() == [[9, 5, 5, 6, 5]]
    assert flat.mask_BRR is None
    assert StaticTree([[0], [0, 0]]).topology.chain
    assert not StaticTree([[0], [1]]).topology.chain


def test_root_only_is_one_row():
    flat = root_only(torch.tensor([[7]]))
    assert (flat.rows, flat.nodes, flat.mask_BRR) == (1, 0, None)
    assert flat.topology.depth_BR.tolist() == [[0]]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [1, 0]], r"\[1, 0\] has no parent; add \[1\]"),
        ([[0], [0]], "listed twice"),
        ([[]], "not a path"),
        ([[-1]], "not a path"),
        ([[0], [0, True]], "not a path"),
        ([], "no paths"),
    ],
)
def test_broken_paths_are_named(paths, message):
    with pytest.raises(ValueError, match=message):
        StaticTree(paths)


def test_paths_may_come_in_any_order_and_skip_ranks():
    tree = StaticTree([[2, 1], [2], [0]])
    assert tree.paths == [(0,), (2,), (2, 1)]
    assert parents_of_paths(tree.paths) == [0, 0, 2]


def test_paths_from_a_file(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    assert make_tree("static", paths=str(file)).paths == [(0,), (1,), (0, 0)]
    file.write_text('{"paths": []}')
    with pytest.raises(ValueError, match=r"tree\.json.*expected a JSON list of paths"):
        make_tree("static", paths=file)
    file.write_text("[[0]")
    with pytest.raises(ValueError, match=r"tree\.json"):
        make_tree("static", paths=file)
    with pytest.raises(ValueError, match=r"missing\.json"):
        make_tree("static", paths=tmp_path / "missing.json")


def test_policies_by_name():
    assert make_tree("none") is None
    assert make_tree("chain", depth=3).settings() == {"name": "chain", "nodes": 3, "depth": 3}
    assert make_tree("static").settings()["paths"] == "eagle1_25"
    assert make_tree("static", paths=[[1]]).settings()["paths"] == [[1]]
    with pytest.raises(ValueError, match="choose one of: chain, static, none"):
        make_tree("dynamics")
    with pytest.raises(ValueError, match="tree=chain.*paths"):
        make_tree("chain", paths=[[0]])
    for depth in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=r"tree\.depth="):
            make_tree("chain", depth=depth)
