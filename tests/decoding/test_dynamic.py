"""Dynamic trees against the pinned implementation's, against dictionaries and a heap, and by the article's numbers."""

import heapq
import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from eaglelab.decoding import DraftSeed, DynamicTree, Engine, make_tree
from eaglelab.decoding.policies.dynamic import best_first, prune
from eaglelab.decoding.policies.expansion import grow
from eaglelab.drafters import DrafterConfig, FeatureDrafter, FusedDrafter, SlotDrafter
from eaglelab.target import FrozenTarget
from tests.oracles.golden import Golden
from tests.oracles.scripted import ScriptDrafter, drafts, hf_greedy, tiny_llama
from tests.oracles.tables import BASE, TableDrafter, child, tree_paths

# ---- the pinned implementation ------------------------------------------------------------------------------


def golden_drafter(golden, kind):
    weights = golden.group("w.")
    embedding = weights.pop("embed_tokens.weight")
    if kind == "eagle2":
        network = FeatureDrafter(golden.drafter_config())
        head = golden["head.weight"]
    else:
        config = golden.drafter_config(fc_bias=False, num_taps=3, draft_vocab_size=golden.facts["draft_vocab_size"])
        network, head = FusedDrafter(config), None
    network.load_state_dict(weights, strict=True)
    target = types.SimpleNamespace(embed=lambda ids: F.embedding(ids, embedding), lm_head=lambda h: h @ head.T)
    return SlotDrafter(network, target, ("final",))


def pinned_tree(golden):
    """Recorded rows as {path of tokens: position}, each row's ancestors, and the root-to-leaf paths."""
    tokens = golden["out.draft_tokens"][0].tolist()
    positions = golden["out.tree_position_ids"].tolist()
    lines = []
    for row in golden["out.tree_mask"][0, 0].bool():
        rows = sorted(row.nonzero().flatten().tolist(), key=positions.__getitem__)
        lines.append(tuple(tokens[r] for r in rows))
    leaves = {tuple(tokens[r] for r in line if r >= 0) for line in golden["out.retrieve_indices"].tolist()}
    assert len(set(lines)) == len(lines)
    return dict(zip(lines, positions, strict=True)), leaves


@pytest.mark.parametrize("case", ["eagle2_draft_d3k4t16_s0", "eagle2_draft_d5k6t30_s0"])
@pytest.mark.parametrize("copies", [1, 2])
def test_golden_trees_of_eagle2(case, copies):
    check_golden(case, copies)


@pytest.mark.parametrize("case", ["eagle3_draft_d3k4t16_s0", "eagle3_draft_d7k8t60_s0"])
@pytest.mark.parametrize("copies", [1, 2])
def test_golden_trees_of_eagle3(case, copies):
    check_golden(case, copies)


def check_golden(case, copies):
    golden, kind = Golden(case), case[:6]
    drafter = golden_drafter(golden, kind)
    facts = golden.facts
    policy = DynamicTree(width=facts["top_k"], depth=facts["depth"] + 1, budget=facts["total_tokens"] - 1)
    features = golden["in.features" if kind == "eagle2" else "in.taps"].expand(copies, -1, -1)
    tokens = golden["in.input_ids"].expand(copies, -1)
    n = features.shape[1]
    state = drafter.new_state(copies, n + policy.max_step_rows)
    hidden = drafter.extend(state, features, tokens[:, 1:], torch.arange(n).expand(copies, -1))
    with torch.no_grad():
        tree = policy.draft(drafter, state, DraftSeed(hidden[:, -1:], torch.full((copies, 1), n - 1)))
    flat = tree.flatten(tokens[:, -1:])
    nodes, leaves = pinned_tree(golden)
    root = int(tokens[0, -1])
    assert flat.rows == len(nodes)
    for b, paths in enumerate(tree_paths(tree)):
        lines = [(root,), *((root, *path) for path in paths)]
        topology = flat.topology
        assert dict(zip(lines, topology.depth_BR[b].tolist(), strict=True)) == nodes
        for row, line in enumerate(lines):
            seen = {lines[other] for other in flat.mask_BRR[b, row].nonzero().flatten().tolist()}
            assert seen == {line[: length + 1] for length in range(len(line))}
        assert {lines[row] for row in topology.leaf_BR[b].nonzero().flatten().tolist()} == leaves


# ---- dictionaries and a heap ----------------------------------------------------------------------------------

VOCAB = 7


def random_table(salt, *, ties):
    """log p by path. With ties: whole numbers, 0 among them, different for siblings, sums exact."""

    def log_p(path):
        generator = torch.Generator().manual_seed((salt * 1_000_003 + path) % 2**31)
        if not ties:
            return torch.randn(VOCAB, generator=generator).mul(2).log_softmax(-1)
        step = int(torch.randint(1, 3, (), generator=generator))
        first = int(torch.randint(0, 2, (), generator=generator))
        return -(torch.randperm(VOCAB, generator=generator) * step + first).float()

    cache: dict[int, torch.Tensor] = {}

    def look_up(paths):
        for path in set(paths.flatten().tolist()) - cache.keys():
            cache[path] = log_p(path)
        return torch.stack([cache[path] for path in paths.flatten().tolist()]).view(*paths.shape, VOCAB)

    return look_up


def by_heap(log_p, start, width, depth, budget):
    """{path: value} of the kept nodes, in the order of recording."""
    number = {(): start}
    value = {(): 0.0}
    recorded: list[tuple[int, ...]] = []
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        newest = []
        for parent in frontier:
            row = log_p(torch.tensor(number[parent])).tolist()
            for token in heapq.nlargest(width, range(VOCAB), key=row.__getitem__):
                path = (*parent, token)
                number[path], value[path] = int(child(number[parent], token)), value[parent] + row[token]
                newest.append(path)
        recorded += newest
        place = {path: i for i, path in enumerate(newest)}
        frontier = heapq.nsmallest(width, newest, key=lambda path: (-value[path], place[path]))
    place = {path: i for i, path in enumerate(recorded)}
    kept = heapq.nsmallest(budget, recorded, key=lambda path: (-value[path], len(path), place[path]))
    return {path: value[path] for path in sorted(kept, key=place.__getitem__)}


@settings(max_examples=60, deadline=None)
@given(
    salt=st.integers(0, 10**6),
    ties=st.booleans(),
    width=st.integers(1, VOCAB),
    depth=st.integers(1, 5),
    budget=st.integers(1, 60),
    batch=st.integers(1, 3),
)
def test_trees_are_those_of_a_heap(salt, ties, width, depth, budget, batch):
    log_p = random_table(salt, ties=ties)
    policy = DynamicTree(width=width, depth=depth, budget=budget)
    drafter = TableDrafter(log_p)
    starts = list(range(1, batch + 1))
    state = drafter.new_state(batch, 0)
    tree = policy.draft(drafter, state, drafter.seed(starts))
    assert tree.tokens_BN.shape == tree.log_values_BN.shape == (batch, policy.max_nodes)
    assert state.path_BP.shape[1] == policy.max_step_rows
    assert tree.expanded == width + (min(depth, budget) - 1) * width**2
    for b, paths in enumerate(tree_paths(tree)):
        expected = by_heap(log_p, starts[b], width, depth, budget)
        assert paths == list(expected)
        assert tree.log_values_BN[b].tolist() == pytest.approx(list(expected.values()), abs=1e-4)
    assert (tree.depths_BN <= policy.max_depth).all()


@settings(max_examples=40, deadline=None)
@given(salt=st.integers(0, 10**6), ties=st.booleans(), depth=st.integers(1, 6), budget=st.integers(1, 40))
def test_kept_nodes_include_their_ancestors(salt, ties, depth, budget):
    drafter = TableDrafter(random_table(salt, ties=ties))
    tree = DynamicTree(3, depth, budget).draft(drafter, drafter.new_state(2, 0), drafter.seed([1, 2]))
    value_BR = F.pad(tree.log_values_BN, (1, 0))
    assert (tree.parents_BN <= torch.arange(tree.tokens_BN.shape[1])).all()
    assert (tree.log_values_BN <= value_BR.gather(1, tree.parents_BN)).all()
    for paths in tree_paths(tree):
        assert len(set(paths)) == len(paths)
        assert all(path[:-1] in {(), *paths} for path in paths)


def test_the_same_tree_whatever_the_batch():
    """Ragged sequences through the real drafter: what is drafted together is what is drafted alone."""
    torch.manual_seed(5)
    target = FrozenTarget(tiny_llama(61))
    network = FeatureDrafter(DrafterConfig.from_target(target.text_config))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    drafter, policy = SlotDrafter(network, target, ("final",)), DynamicTree(4, 4, 20)
    counts = [9, 4, 6]
    features, tokens = torch.randn(3, 9, 24), torch.randint(0, 61, (3, 9))

    def draft(rows, n, counts=None):
        state = drafter.new_state(len(rows), n + policy.max_step_rows)
        hidden = drafter.extend(
            state, features[rows, :n], tokens[rows, :n], torch.arange(n).expand(len(rows), -1), counts
        )
        last_B1 = torch.tensor(counts or [n])[:, None] - 1
        seed = DraftSeed(hidden[torch.arange(len(rows))[:, None], last_B1], last_B1)
        with torch.no_grad():
            return policy.draft(drafter, state, seed)

    together = draft([0, 1, 2], 9, counts)
    for b, count in enumerate(counts):
        alone = draft([b], count)
        assert tree_paths(alone) == [tree_paths(together)[b]]
        torch.testing.assert_close(alone.log_values_BN[0], together.log_values_BN[b], rtol=1e-4, atol=1e-5)
    assert len({str(paths) for paths in tree_paths(together)}) == 3


# ---- the article's example, and given confidences ----------------------------------------------------------------

ARTICLE = {
    (): [("A", 0.60), ("B", 0.40)],
    ("A",): [("A1", 0.80), ("A2", 0.20)],
    ("B",): [("B1", 0.95)],
}


def test_the_articles_numbers():
    def expand(frontier):
        return [(node, token, c) for node in frontier for token, c in ARTICLE.get(node.path, [])]

    assert [node.token for node in grow(expand, width=2, depth=2, budget=4)] == ["A", "A1", "B", "B1"]
    assert [node.token for node in grow(expand, width=2, depth=2, budget=9)] == ["A", "A1", "B", "B1", "A2"]
    assert [node.token for node in grow(expand, width=1, depth=2, budget=9)] == ["A", "A1", "B", "A2"]
    assert grow(expand, width=2, depth=2, budget=0) == grow(expand, width=2, depth=0, budget=4) == []

    names = ["A", "B", "A1", "A2", "B1"]
    value_BM = torch.tensor([[0.60, 0.40, 0.60 * 0.80, 0.60 * 0.20, 0.40 * 0.95]]).log()
    assert [names[m] for m in best_first(value_BM)[0]] == ["A", "A1", "B", "B1", "A2"]
    kept_BN, parent_BN = prune(torch.tensor([[0, 0, 1, 1, 2]]), value_BM, 4)
    assert [names[m] for m in kept_BN[0]] == ["A", "B", "A1", "B1"]
    assert parent_BN.tolist() == [[0, 0, 1, 2]]


@settings(max_examples=40, deadline=None)
@given(salt=st.integers(0, 10**6), width=st.integers(1, 5), depth=st.integers(1, 4), budget=st.integers(1, 40))
def test_given_confidences_grow_the_same_tree(salt, width, depth, budget):
    log_p = random_table(salt, ties=False)
    number = {}

    def expand(frontier):
        proposals = []
        for node in frontier:
            number[node.path] = int(child(number[node.path[:-1]], node.token)) if node.path else 3
            best = log_p(torch.tensor(number[node.path])).double().topk(width)
            proposals += [
                (node, t, math.exp(v)) for v, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        return proposals

    nodes = grow(expand, width=width, depth=depth, budget=budget)
    drafter = TableDrafter(log_p)
    tree = DynamicTree(width, depth, budget).draft(drafter, drafter.new_state(1, 0), drafter.seed([3]))
    assert [node.path for node in sorted(nodes, key=lambda node: node.place)] == tree_paths(tree)[0]


def certain(frontier):
    return [(node, "x", 1.0) for node in frontier]


def test_equal_values_go_to_the_shallower_node():
    chain = grow(certain, width=2, depth=4, budget=3)
    assert [node.level for node in chain] == [1, 2, 3]
    kept_BN, parent_BN = prune(torch.tensor([[0, 0, 1, 3]]), torch.zeros(1, 4), 3)
    assert kept_BN.tolist() == [[0, 1, 2]] and parent_BN.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("expand", "message"),
    [
        (lambda f: [(f[0], "x", math.nan)], "nan is not a probability"),
        (lambda f: [(f[0], "x", math.inf)], "inf is not a probability"),
        (lambda f: [(f[0], "x", -0.1)], "-0.1 is not a probability"),
        (lambda f: [(f[0], "x", 1.1)], "1.1 is not a probability"),
        (lambda f: [(f[0], "x", 0.1), (f[0], "x", 0.2)], "given twice"),
        (lambda f: [(f[0], "x", 0.6), (f[0], "y", 0.4 + 1e-9)], r"sum to 1\.0000.*, more than 1"),
        (lambda f: certain(grow(certain, width=1, depth=1, budget=1)), "not in the frontier"),
    ],
)
def test_impossible_expansions_are_named(expand, message):
    with pytest.raises(ValueError, match=message):
        grow(expand, width=2, depth=2, budget=2)


def test_a_parent_that_was_not_selected_is_named():
    def expand(frontier):
        if not frontier[0].path:
            expand.level_1 = [(frontier[0], "A", 0.6), (frontier[0], "B", 0.4)]
            expand.root = frontier[0]
            return expand.level_1
        return [(expand.root, "C", 0.1)]

    with pytest.raises(ValueError, match="not in the frontier"):
        grow(expand, width=1, depth=2, budget=2)


def test_rounding_of_a_full_distribution_is_no_error():
    tenths = [0.1] * 10
    assert len(grow(lambda f: [(f[0], t, c) for t, c in enumerate(tenths)], width=1, depth=1, budget=10)) == 10


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"width": 2.0}, {"width": True}, {"depth": -1}, {"budget": -1}, {"budget": 1.5}]
)
def test_settings_of_grow(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        grow(certain, **{"width": 1, "depth": 1, "budget": 1} | wrong)


# ---- the policy's own promises -------------------------------------------------------------------------------


def test_sizes_are_known_beforehand():
    policy = DynamicTree()
    assert policy.settings() == {"name": "dynamic", "nodes": 59, "depth": 6, "width": 10, "budget": 59}
    assert (policy.max_depth, policy.max_nodes, policy.max_step_rows, policy.samples) == (6, 59, 50, False)
    assert make_tree("dynamic", width=2, depth=2, budget=500).max_nodes == 6
    shallow = make_tree("dynamic", width=4, depth=9, budget=2)
    assert (shallow.max_depth, shallow.max_step_rows) == (2, 4)
    assert make_tree("dynamic", depth=1).max_step_rows == 0


def test_width_one_is_a_chain():
    log_p = random_table(1, ties=False)
    drafter = TableDrafter(log_p)
    tree = DynamicTree(1, 4, 3).draft(drafter, drafter.new_state(1, 0), drafter.seed([1]))
    assert tree.topology.chain and tree.parents_BN.tolist() == [[0, 1, 2]]
    assert tree.flatten(torch.tensor([[0]])).mask_BRR is None


@pytest.mark.parametrize("name", ["width", "depth", "budget"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_settings_are_whole_numbers(name, value):
    with pytest.raises(ValueError, match=rf"tree\.{name}=.*whole number >= 1"):
        make_tree("dynamic", **{name: value})


def test_width_above_the_draft_vocabulary():
    drafter = TableDrafter(random_table(0, ties=False))
    with pytest.raises(ValueError, match=r"8 children of one node.*7 tokens; use tree\.width=7"):
        DynamicTree(8, 2, 4).draft(drafter, drafter.new_state(1, 0), drafter.seed([1]))
    with pytest.raises(ValueError, match="tree=dynamic.*paths"):
        make_tree("dynamic", paths=[[0]])


def test_tokens_are_target_ids():
    ids = torch.tensor([9, 3, 12, 0, 5, 7, 1])
    log_p = random_table(4, ties=False)
    to_draft = torch.full((BASE,), -1).scatter(0, ids, torch.arange(VOCAB))

    def by_target_path(paths):  # the drafter under test names children by target id
        return log_p(paths)

    drafter = TableDrafter(by_target_path, ids)
    tree = DynamicTree(3, 1, 3).draft(drafter, drafter.new_state(1, 0), drafter.seed([1]))
    best = log_p(torch.tensor(1)).topk(3).indices
    assert to_draft[tree.tokens_BN[0]].tolist() == best.tolist()


def test_a_log_probability_rounded_above_0_lifts_no_child_over_its_parent():
    def log_p(paths):
        return torch.tensor([1e-6, -9.0, -9.5]).expand(*paths.shape, -1)

    drafter = TableDrafter(log_p)
    tree = DynamicTree(2, 4, 3).draft(drafter, drafter.new_state(1, 0), drafter.seed([1]))
    assert tree_paths(tree) == [[(0,), (0, 0), (0, 0, 0)]]
    assert tree.log_values_BN.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("where", ["one token", "one path", "everywhere"])
def test_nan_makes_no_broken_tree(where):
    table = random_table(3, ties=False)

    def log_p(paths):
        values = table(paths).clone()
        if where == "one token":
            values[..., 2] = torch.nan
        elif where == "everywhere":
            values[:] = torch.nan
        else:
            values[paths == int(child(1, 2))] = torch.nan
        return values

    drafter = TableDrafter(log_p)
    policy = DynamicTree(4, 3, 12)
    tree = policy.draft(drafter, drafter.new_state(1, 0), drafter.seed([1]))
    (paths,) = tree_paths(tree)
    assert len(set(paths)) == 12 and all(path[:-1] in {(), *paths} for path in paths)
    value = dict(zip(paths, tree.log_values_BN[0].tolist(), strict=True))
    if where == "everywhere":
        assert all(math.isnan(v) for v in value.values())
    else:
        tainted = [p for p in paths if (2 in p if where == "one token" else p[0] == 2 and len(p) > 1)]
        assert all(math.isnan(v) == (p in tainted) for p, v in value.items())
        clean = [v for v in value.values() if not math.isnan(v)]
        assert len(tainted) < 6 and len(clean) > 6


def test_no_host_sync():
    """Under fake tensors a value that is brought to the host raises."""

    class Fake:
        def step(self, state, hidden_BWd, tokens_BW, position_BW, ancestor_BWP):
            return hidden_BWd + tokens_BW[..., None]

        def log_probs(self, hidden):
            return (hidden @ torch.ones(4, 20)).log_softmax(-1)

        def to_target_ids(self, ids):
            return ids + 1

    with FakeTensorMode():
        seed = DraftSeed(torch.zeros(3, 1, 4), torch.zeros(3, 1, dtype=torch.int64))
        tree = DynamicTree(5, 4, 30).draft(Fake(), None, seed)
    assert tree.tokens_BN.shape == (3, 30)
    assert tree.topology.ancestor_BRR.shape == (3, 31, 31)


# ---- the floor -----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    salt=st.integers(0, 10**6),
    width=st.integers(1, VOCAB),
    depth=st.integers(1, 5),
    budget=st.integers(1, 60),
    floor=st.sampled_from([1e-4, 1e-3, 0.01, 0.05, 0.2, 0.9]),
)
def test_a_floor_keeps_the_nodes_that_reach_it(salt, width, depth, budget, floor):
    log_p = random_table(salt, ties=False)
    drafter = TableDrafter(log_p)
    state = drafter.new_state(1, 0)
    tree = DynamicTree(width, depth, budget, floor).draft(drafter, state, drafter.seed([3]))
    expected = by_heap(log_p, 3, width, depth, budget)
    worth = {path: value for path, value in expected.items() if value >= math.log(floor)}
    (paths,) = tree_paths(tree)
    assert set(paths) == (set(worth) or {next(iter(by_heap(log_p, 3, width, 1, 1)))})
    everything = by_heap(log_p, 3, width, min(depth, budget), 10**6)
    forwarded = [path for path, value in everything.items() if value >= math.log(floor) and len(path) < depth]
    assert state.path_BP.shape[1] <= len(forwarded)  # no row of a hopeless node
    assert drafter.steps == min(max((len(path) for path in forwarded), default=0), min(depth, budget) - 1)


def test_with_a_floor_the_most_hopeful_sequence_of_a_batch_decides():
    log_p = random_table(5, ties=False)
    for floor in (0.02, 0.1):
        policy, starts = DynamicTree(3, 4, 20, floor), [1, 2, 3, 4]
        alone = []
        for start in starts:
            drafter = TableDrafter(log_p)
            alone += tree_paths(policy.draft(drafter, drafter.new_state(1, 0), drafter.seed([start])))
        drafter = TableDrafter(log_p)
        together = tree_paths(policy.draft(drafter, drafter.new_state(4, 0), drafter.seed(starts)))
        assert len({len(paths) for paths in alone}) > 1, "the case decides nothing"
        assert all(set(one) <= set(many) for one, many in zip(alone, together, strict=True))
        assert {len(paths) for paths in together} == {max(len(paths) for paths in alone)}


@pytest.mark.parametrize("batch", [1, 4])
def test_text_with_a_floor_is_that_of_greedy_decoding(batch):
    target = FrozenTarget(tiny_llama(23))
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [11, 3]]
    drafter = ScriptDrafter(drafts("noisy", target.model, 23), [prompt[0] for prompt in prompts])
    engine = Engine(target, drafter, DynamicTree(4, 5, 12, floor=0.15))
    results = engine.generate(prompts, max_new_tokens=24, stop_ids=set(), batch=batch)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == hf_greedy(target.model, prompt, 24)
    assert len({record.drafted for result in results for record in result.rounds}) > 2
    assert max(count for result in results for count in result.accepted) > 1


@pytest.mark.parametrize("floor", [-0.1, 1, 1.5, math.nan])
def test_a_floor_is_a_probability(floor):
    with pytest.raises(ValueError, match=r"tree\.floor="):
        DynamicTree(floor=floor)
