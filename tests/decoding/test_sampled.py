"""Sampled trees: how children are drawn, and that what is published follows the target's distribution exactly."""

import dataclasses
import itertools
import json
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from eaglelab.decoding import DraftSeed, SampledTree, StaticTree, Topology, Tree, make_tree
from eaglelab.decoding import residual as rule
from eaglelab.decoding.policies import STATIC_25, sampled
from eaglelab.decoding.residual import accept_sampled, draw_from
from eaglelab.decoding.tree import Proposals, root_only
from eaglelab.decoding.verify import follow
from eaglelab.drafters import DrafterConfig, FeatureDrafter, SlotDrafter
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import tiny_llama
from tests.oracles.tables import TableDrafter, child

ALPHA = 1e-6


def chi_square(counts, law):
    """p-value of counts [n] against probabilities [n]; cells that expect fewer than 10 are merged.

    0 where an impossible outcome came up.
    """
    if (counts[law == 0] > 0).any():
        return 0.0
    counts, expected = counts.double(), law.double() * counts.sum()
    large = expected >= 10
    seen = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def total_variation(counts, law):
    return float((counts / counts.sum() - law).abs().sum() / 2)


def expected_variation(law, draws):
    """Mean total variation of `draws` draws from `law` itself."""
    return float((law * (1 - law) * 2 / (math.pi * draws)).sqrt().sum() / 2)


# ---- the law of what is published, and rules that break it ----------------------------------------------------

VOCAB, HORIZON = 5, 3
DRAFT_IDS = torch.tensor([3, 0, 4, 1])  # the drafter cannot propose token 2
TEMPERATURE = 0.6
DRAWS = 200_000
START = 1


class Tables:
    """Random target and draft distributions for every path of up to HORIZON tokens."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        size = int(child(child(child(START, VOCAB), VOCAB), VOCAB)) + 1
        self.logits = torch.randn(size, VOCAB, generator=generator) * 1.2
        scores = self.logits / TEMPERATURE
        fourth = scores.topk(4, dim=-1).values[:, -1:]
        self.p = scores.masked_fill(scores < fourth, -torch.inf).softmax(-1)
        close = self.logits[:, DRAFT_IDS] + 0.8 * torch.randn(size, 4, generator=generator)
        self.log_q = close.log_softmax(-1)

    @staticmethod
    def warp(log_q):
        """What the engine does for the draft: temperature and top-3, not renormalised."""
        scores = log_q / TEMPERATURE
        return scores.masked_fill(scores < scores.topk(3, dim=-1).values[..., -1:], -torch.inf)

    def law(self):
        """P(next HORIZON tokens), [VOCAB ** HORIZON], by the target alone."""
        law = []
        for tokens in itertools.product(range(VOCAB), repeat=HORIZON):
            path, chance = START, 1.0
            for token in tokens:
                chance, path = chance * float(self.p[path, token]), int(child(path, token))
            law.append(chance)
        return torch.tensor(law, dtype=torch.float64) / sum(law)


SHAPES = {
    "widths": SampledTree([3, 2]),
    "more children than tokens": SampledTree([4, 2]),
    "uneven": SampledTree(paths=[[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0]]),
}


def rounds(tables, policy, *, seed=0, draws=DRAWS, p_rows=None, one_uniform=False):
    """Counts of the next HORIZON tokens: one round each, filled up by drawing from the target."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(draws, *shape, generator=generator)

    drafter = TableDrafter(lambda path: tables.log_q[path], DRAFT_IDS)
    seed_B = drafter.seed([START] * draws, noise=lambda shape: uniform(*shape), warp=tables.warp)
    flat = policy.draft(drafter, drafter.new_state(draws, 0), seed_B).flatten(torch.zeros(draws, 1, dtype=torch.int64))
    parent_R = flat.topology.parent_BR[0]
    path_BR = torch.full_like(flat.tokens_BR, START)
    for row in range(1, flat.rows):
        path_BR[:, row] = child(path_BR[:, parent_R[row]], flat.tokens_BR[:, row])
    p_BRV = tables.p[path_BR] if p_rows is None else p_rows(tables, path_BR, flat)
    L, K = flat.topology.path_BRL.shape[-1], flat.proposals.children_EK.shape[1]
    draw_BL = uniform(L)
    accept_BLK = draw_BL[..., None].expand(-1, -1, K) if one_uniform else uniform(L, K)
    decision = accept_sampled(p_BRV, flat, accept_BLK, draw_BL)

    path_B, outcome_B = torch.full((draws,), START), torch.zeros(draws, dtype=torch.int64)
    for place in range(HORIZON):
        fresh_B = torch.multinomial(tables.p[path_B], 1, generator=generator)[:, 0]
        if place < L:
            published_B = decision.published_BL[:, place]
            fresh_B = torch.where(place <= decision.accepted_B, published_B, fresh_B)
        path_B, outcome_B = child(path_B, fresh_B), outcome_B * VOCAB + fresh_B
    return outcome_B.bincount(minlength=VOCAB**HORIZON), decision


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_published_tokens_follow_the_target(shape, seed):
    tables = Tables(seed)
    counts, decision = rounds(tables, SHAPES[shape])
    law = tables.law()
    assert chi_square(counts, law) > ALPHA
    assert total_variation(counts, law) < 2 * expected_variation(law, DRAWS)
    assert decision.accepted_B.double().mean() > 0.8, "a tree that is never accepted tests nothing"
    assert decision.accepted_B.bincount(minlength=3).min() > DRAWS / 50


def unscaled_residual(p_BV, q_BV):
    return (p_BV - q_BV).clamp(min=0)


def patch_draw(monkeypatch, choose):
    """Children by `choose(log_q, gumbel-perturbed log q, K)` instead of the largest perturbed ones."""

    def call(self, log_p_BWV, top_k):
        log_q_BWV = self.warp(log_p_BWV).log_softmax(-1)
        self.q.append(log_q_BWV.exp())
        uniform_BWV = self.noise(tuple(log_p_BWV.shape[1:])).clamp(min=1e-30)
        ids_BWK = choose(log_q_BWV, log_q_BWV - (-uniform_BWV.log()).log(), top_k)
        return log_p_BWV.gather(-1, ids_BWK), ids_BWK

    monkeypatch.setattr(sampled._WithoutReplacement, "__call__", call)


def by_probability(log_q_BWV, perturbed_BWV, top_k):
    drawn = perturbed_BWV.topk(top_k, dim=-1).indices
    order = log_q_BWV.gather(-1, drawn).argsort(dim=-1, descending=True)
    return drawn.gather(-1, order)


def recorded_at_temperature_1(monkeypatch):
    real = sampled._WithoutReplacement.__call__

    def call(self, log_p_BWV, top_k):
        drawn = real(self, log_p_BWV, top_k)
        self.q[-1] = log_p_BWV.exp()
        return drawn

    monkeypatch.setattr(sampled._WithoutReplacement, "__call__", call)


def unprocessed_at_leaves(tables, path_BR, flat):
    leaf_BR1 = flat.topology.leaf_BR.expand(path_BR.shape)[..., None]
    return torch.where(leaf_BR1, tables.logits[path_BR].softmax(-1), tables.p[path_BR])


def parents_rows(tables, path_BR, flat):
    return tables.p[path_BR[:, flat.topology.parent_BR[0]]]


# Drawing with replacement is not among them: a child that repeats an earlier one is passed over, which is exact.
WRONG = {
    "residual not renormalised": lambda m: m.setattr(rule, "_reduce", unscaled_residual),
    "after a rejection, p itself": lambda m: m.setattr(rule, "_reduce", lambda p, q: p),
    "residual |p - q|": lambda m: m.setattr(rule, "_reduce", lambda p, q: rule._normalise((p - q).abs())),
    "rejected child set to zero": lambda m: m.setattr(rule, "_reduce", lambda p, q: rule._normalise(p * (q == 0))),
    "q keeps the rejected child": lambda m: m.setattr(rule, "_without", lambda q, x: q),
    "q not renormalised": lambda m: m.setattr(rule, "_without", lambda q, x: q.scatter(1, x[:, None], 0.0)),
    "accepted with p(x)": lambda m: m.setattr(rule, "_passes", lambda px, qx, u: u < px),
    "accepted where p >= q": lambda m: m.setattr(rule, "_passes", lambda px, qx, u: px >= qx),
    "always accepted": lambda m: m.setattr(rule, "_passes", lambda px, qx, u: px > 0),
    "most probable child tried first": lambda m: patch_draw(m, by_probability),
    "most likely children": lambda m: patch_draw(m, lambda log_q, _, k: log_q.topk(k, dim=-1).indices),
    "q at temperature 1": recorded_at_temperature_1,
    "last token from unprocessed p": {"p_rows": unprocessed_at_leaves},
    "p of the parent's row": {"p_rows": parents_rows},
    "one uniform number for all": {"one_uniform": True},
}


@pytest.mark.parametrize("name", WRONG)
def test_the_same_test_rejects_wrong_rules(name, monkeypatch):
    wrong, tables = WRONG[name], Tables(1)
    options = wrong if isinstance(wrong, dict) else {}
    if callable(wrong):
        wrong(monkeypatch)
    counts, _ = rounds(tables, SHAPES["widths"], **options)
    assert chi_square(counts, tables.law()) < ALPHA / 100


# ---- the rule, literally -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    parents: list[int]
    tokens: list[int]  # of the rows, the root's first
    p: list[list[Fraction]]
    q: dict[int, list[Fraction]]  # by row with children
    children: dict[int, list[int]]
    accept: list[list[Fraction]]
    draw: list[Fraction]


def literal(case):
    """Rows and published tokens of one sequence, in whole fractions."""
    row, rows, published = 0, [0], []
    while True:
        level, p = len(rows) - 1, case.p[row]
        q = case.q.get(row, [])
        taken = None
        for k, node in enumerate(case.children.get(row, [])):
            x = case.tokens[node]
            if q[x] == 0:
                continue
            if p[x] > 0 and case.accept[level][k] < min(Fraction(1), p[x] / q[x]):
                taken = node
                break
            left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
            p = [a / sum(left) for a in left] if sum(left) else p
            rest = [Fraction(0) if i == x else a for i, a in enumerate(q)]
            q = [a / sum(rest) for a in rest] if sum(rest) else rest
        if taken is None:
            cumulated = list(itertools.accumulate(p))
            published.append(next(i for i, c in enumerate(cumulated) if c > case.draw[level]))
            return rows, published
        published.append(case.tokens[taken])
        row = taken
        rows.append(row)


def shares(weights):
    return [Fraction(w, sum(weights)) for w in weights]


@st.composite
def cases(draw, vocab=4, size=None):
    """Trees over four tokens, with zero and one-hot distributions, dead children and q = p among them."""
    weights = st.lists(st.sampled_from([0, 0, 1, 2, 5, 9]), min_size=vocab, max_size=vocab).filter(sum)
    odd = st.integers(0, 2**22).map(lambda k: Fraction(2 * k + 1, 2**24))  # no product of the weights meets it
    parents, tokens, children = [], [0], {}
    for row in range(1, (size or draw(st.integers(2, 9)))):
        parent = draw(st.integers(0, row - 1))
        free = [t for t in range(vocab) if t not in [tokens[c] for c in children.get(parent, [])]]
        if not free:
            parent, free = row - 1, list(range(vocab))
        parents.append(parent)
        tokens.append(draw(st.sampled_from(free)))
        children.setdefault(parent, []).append(row)
    p = [shares(draw(weights)) for _ in tokens]
    q = {row: p[row] if draw(st.booleans()) else shares(draw(weights)) for row in children}
    L = len(tokens)
    accept = [[draw(odd) for _ in range(vocab)] for _ in range(L)]
    return Case(parents, tokens, p, q, children, accept, [draw(odd) for _ in range(L)])


def as_flat(case):
    parent_BN = torch.tensor([case.parents])
    topology = Topology.from_parents(parent_BN, len(case.parents))
    inner = sorted(case.children)
    K = max(len(rows) for rows in case.children.values())
    proposals = Proposals(
        torch.tensor([[[float(a) for a in case.q[row]] for row in inner]]),
        torch.tensor([inner.index(row) if row in inner else -1 for row in range(len(case.tokens))]),
        torch.tensor([case.children[row] + [-1] * (K - len(case.children[row])) for row in inner]),
        torch.arange(len(case.p[0])),
    )
    tokens_BR = torch.tensor([case.tokens])
    tree = Tree(tokens_BR[:, 1:], torch.zeros(parent_BN.shape), topology, proposals)
    return tree.flatten(tokens_BR[:, :1])


def floats(values):
    return torch.tensor([[float(v) for v in row] for row in values], dtype=torch.float64)[None]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_decisions_are_the_literal_ones(case):
    flat = as_flat(case)
    flat = dataclasses.replace(
        flat, proposals=dataclasses.replace(flat.proposals, q_BEV=floats([case.q[r] for r in sorted(case.q)]))
    )
    host = accept_sampled(floats(case.p), flat, floats(case.accept), floats([case.draw])[0]).to_host()
    assert (host.rows[0], host.published[0]) == literal(case)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_one_hot_target_is_followed(case):
    """Temperature 0: whatever the drafts and the numbers, the deepest path of most probable tokens."""
    best_BR = torch.tensor([[row.index(max(row)) for row in case.p]])
    case.q = {  # the children were drawn, so each has some probability; one that p needs may be missing
        row: shares([1 if x in [case.tokens[c] for c in case.children[row]] else 0 for x in range(4)])
        for row in case.children
    }
    flat = as_flat(case)
    p_BRV = torch.nn.functional.one_hot(best_BR, 4).float()
    host = accept_sampled(p_BRV, flat, floats(case.accept).float(), floats([case.draw])[0].float()).to_host()
    wanted = follow(best_BR, flat).to_host()
    assert (host.rows, host.published) == (wanted.rows, wanted.published)


def test_impossible_children_are_never_accepted():
    """p(x) = 0 at the smallest number that can be drawn, 0."""
    p_BRV = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    case = Case([0], [1, 0], [], {0: shares([1, 1, 1])}, {0: [1]}, [], [])
    case.p = [shares([0, 1, 0]), shares([1, 0, 0])]
    host = accept_sampled(p_BRV, as_flat(case), torch.zeros(1, 2, 1), torch.zeros(1, 2)).to_host()
    assert (host.rows, host.published) == ([[0]], [[1]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_exhausted_residual_is_no_nan(dtype):
    """p = q up to the rounding of half precision: whatever is rejected, a possible token is published."""
    generator = torch.Generator().manual_seed(0)
    B, V = 4096, 6
    q_BV = (torch.randn(B, V, generator=generator) * 3).softmax(-1)
    q_BV[:, 5] = 0
    proposals = Proposals(q_BV[:, None], torch.tensor([0, -1, -1]), torch.tensor([[1, 2]]), torch.arange(V))
    nodes_BN = q_BV.multinomial(2, generator=generator)
    tree = Tree(nodes_BN, torch.zeros(B, 2), Topology.from_parents(torch.zeros(1, 2, dtype=torch.int64), 1), proposals)
    p_BRV = q_BV.to(dtype)[:, None].expand(-1, 3, -1)
    nearly_1 = torch.full((B, 2, 2), 1 - 2**-24)
    decision = accept_sampled(p_BRV, tree.flatten(nodes_BN[:, :1]), nearly_1, nearly_1[..., 0])
    published_B1 = decision.published_BL[:, :1]
    assert (p_BRV[:, 0].gather(1, published_B1) > 0).all()
    if dtype != torch.float32:
        assert (decision.accepted_B == 0).any()

    same = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    assert torch.equal(rule._reduce(same, same), same)
    assert torch.equal(rule._without(same[:, :1], torch.tensor([0])), torch.zeros(1, 1, dtype=torch.float64))


def test_the_bare_root_needs_no_proposals():
    p_BRV = torch.tensor([[[0.2, 0.0, 0.8]], [[0.0, 1.0, 0.0]]])
    decision = accept_sampled(
        p_BRV, root_only(torch.zeros(2, 1, dtype=torch.int64)), torch.rand(2, 1, 0), torch.tensor([[0.5], [0.0]])
    )
    assert decision.to_host().published == [[2], [1]]


# ---- drawing -----------------------------------------------------------------------------------------------------


def test_draws_follow_p():
    p_V = torch.tensor([0.0, 0.5, 0.0, 0.3, 1e-3, 0.199, 0.0])
    u_B = torch.rand(DRAWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = draw_from(p_V.expand(DRAWS, -1), u_B).bincount(minlength=7)
    assert chi_square(counts, p_V.double()) > ALPHA


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-9, 0.1, 1.0, 3.0]), min_size=1, max_size=12).filter(any),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53, 1 - 2**-24, 2**-60])),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_impossible_ids_are_never_drawn(weights, u, dtype):
    p = torch.tensor(weights, dtype=dtype)
    drawn = int(draw_from(p, torch.tensor(u, dtype=torch.float64)))
    assert p[drawn] > 0
    running = torch.tensor([math.fsum(weights[: i + 1]) for i in range(len(weights))]) / math.fsum(weights)
    assert running[drawn] >= u - 1e-6
    assert drawn == 0 or running[drawn - 1] <= u + 1e-6


def test_draws_keep_their_shape_and_mark_rows_without_mass():
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0]], [[0.0, 0.0], [torch.nan, 1.0]]])
    assert draw_from(p, torch.full((2, 2), 0.3)).tolist() == [[1, 0], [-1, -1]]
    assert draw_from(torch.tensor([torch.inf, 1.0]), torch.tensor(0.1)) == -1


# ---- the policy ----------------------------------------------------------------------------------------------------


def uniform(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda shape: torch.rand(batch, *shape, generator=generator)


def test_children_are_drawn_without_replacement():
    """The law of the root's ordered children: q(x) q(y) / (1 - q(x)) ..."""
    log_q_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drafter = TableDrafter(lambda path: log_q_V.expand(*path.shape, -1))
    seed = drafter.seed([1] * DRAWS, noise=uniform(DRAWS), warp=lambda log_p: log_p)
    tree = SampledTree([3]).draft(drafter, drafter.new_state(DRAWS, 0), seed)
    x, y, z = tree.tokens_BN.unbind(1)
    law = torch.zeros(4, 4, 4, dtype=torch.float64)
    q = log_q_V.double().exp()
    for a, b, c in itertools.permutations(range(4), 3):
        law[a, b, c] = q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])
    assert chi_square((x * 16 + y * 4 + z).bincount(minlength=64), law.flatten()) > ALPHA


def test_values_are_at_temperature_1_and_dead_children_come_last():
    tables = Tables(4)
    drafter = TableDrafter(lambda path: tables.log_q[path], DRAFT_IDS)
    policy = SampledTree([4, 4])
    seed = drafter.seed([START] * 50, noise=uniform(50), warp=tables.warp)
    tree = policy.draft(drafter, drafter.new_state(50, 0), seed)
    proposals = tree.proposals
    torch.testing.assert_close(proposals.q_BEV.sum(-1), torch.ones(50, 5))
    assert torch.equal(proposals.target_ids_V, DRAFT_IDS)
    to_draft = torch.full((VOCAB,), -1).scatter(0, DRAFT_IDS, torch.arange(4))
    for b in range(50):
        for slot, rows in enumerate(proposals.children_EK.tolist()):
            nodes = [row - 1 for row in rows]
            tokens = tree.tokens_BN[b, nodes]
            assert len(set(tokens.tolist())) == 4
            parent = int(tree.parents_BN[0, nodes[0]])
            assert proposals.slot_R[parent] == slot
            path = START if parent == 0 else child(START, int(tree.tokens_BN[b, parent - 1]))
            value = 0.0 if parent == 0 else float(tree.log_values_BN[b, parent - 1])
            ids = to_draft[tokens]
            torch.testing.assert_close(tree.log_values_BN[b, nodes], value + tables.log_q[path, ids])
            q = proposals.q_BEV[b, slot, ids]
            assert (q[:3] > 0).all() and q[3] == 0
    assert (proposals.slot_R[5:] == -1).all()


def test_an_exact_0_among_the_numbers_is_no_dead_token():
    drafter = TableDrafter(lambda path: torch.tensor([-math.inf, -0.1, -3.0, -math.inf]).expand(*path.shape, -1))
    seed = drafter.seed([1], noise=lambda shape: torch.zeros(1, *shape), warp=lambda log_p: log_p)
    tree = SampledTree([2]).draft(drafter, drafter.new_state(1, 0), seed)
    assert tree.tokens_BN.tolist() == [[1, 2]]


def test_every_row_is_drawn_from_its_own_distribution():
    """Through the real drafter: the recorded q of each inner row is the sequential one of its path."""
    torch.manual_seed(1)
    target = FrozenTarget(tiny_llama(61))
    network = FeatureDrafter(DrafterConfig.from_target(target.text_config))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    drafter, policy = SlotDrafter(network, target, ("final",)), SampledTree([3, 2, 2])
    features, tokens, n = torch.randn(2, 5, 24), torch.randint(0, 61, (2, 5)), 5

    def extended():
        state = drafter.new_state(2, n + policy.max_step_rows)
        return state, drafter.extend(state, features, tokens, torch.arange(n).expand(2, -1))[:, -1:]

    state, hidden = extended()
    seed = DraftSeed(hidden, torch.full((2, 1), n - 1), uniform(2), lambda log_p: log_p / 0.7)
    with torch.no_grad():
        tree = policy.draft(drafter, state, seed)
    flat = tree.flatten(tokens[:, -1:])
    for row, slot in enumerate(flat.proposals.slot_R.tolist()):
        if slot < 0:
            continue
        state, hidden = extended()
        for level, node in enumerate(flat.topology.path_BRL[0, row, 1 : flat.topology.depth_BR[0, row] + 1], start=1):
            position_B1 = torch.full((2, 1), n - 1 + level)
            hidden = drafter.step(state, hidden, flat.tokens_BR[:, node, None], position_B1)
        q_BV = (drafter.log_probs(hidden[:, 0]) / 0.7).softmax(-1)
        torch.testing.assert_close(flat.proposals.q_BEV[:, slot], q_BV, rtol=1e-4, atol=1e-6)


def test_the_default_shape_is_that_of_tree_static():
    policy = make_tree("sampled")
    assert policy.settings() == {"name": "sampled", "nodes": 25, "depth": 5, "paths": "eagle1_25"}
    assert policy.paths == StaticTree().paths == list(STATIC_25)
    assert policy.samples and not StaticTree().samples
    widths = make_tree("sampled", widths=[3, 2, 1])
    assert widths.settings() == {"name": "sampled", "nodes": 15, "depth": 3, "widths": [3, 2, 1]}
    assert widths.max_step_rows == 9
    assert make_tree("sampled", widths=[1, 1]).topology.chain


def test_paths_from_a_file(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [1], [1, 0]]))
    assert make_tree("sampled", paths=str(file)).paths == [(0,), (1,), (1, 0)]
    with pytest.raises(ValueError, match=r"missing\.json"):
        make_tree("sampled", paths=tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"widths": []}, "whole number of children >= 1 for each level"),
        ({"widths": [2, 0]}, "whole number of children"),
        ({"widths": [2.0]}, "whole number of children"),
        ({"widths": [2], "paths": [[0]]}, "not both"),
        ({"paths": [[0], [2]]}, r"path \[2\] skips \[1\]"),
        ({"paths": [[0], [0, 1]]}, r"path \[0, 1\] skips \[0, 0\]"),
        ({"paths": []}, "sampled tree: no paths"),
        ({"paths": [[0], [0, 0, 0]]}, "has no parent"),
        ({"depth": 3}, "tree=sampled.*depth"),
    ],
)
def test_broken_shapes_are_named(shape, message):
    with pytest.raises(ValueError, match=message):
        make_tree("sampled", **shape)


def test_what_the_engine_must_supply():
    drafter = TableDrafter(lambda path: torch.zeros(*path.shape, 3))
    for random in ({}, {"noise": uniform(1)}, {"warp": lambda log_p: log_p}):
        with pytest.raises(ValueError, match="engine must supply noise and warp"):
            SampledTree([2]).draft(drafter, drafter.new_state(1, 0), drafter.seed([1], **random))
    seed = drafter.seed([1], noise=uniform(1), warp=lambda log_p: log_p)
    with pytest.raises(ValueError, match="4 children of one node.*3 tokens"):
        SampledTree([4]).draft(drafter, drafter.new_state(1, 0), seed)


def test_no_host_sync():
    """Under fake tensors a value that is brought to the host raises."""

    class Fake:
        def step(self, state, hidden_BWd, tokens_BW, position_BW, ancestor_BWP):
            return hidden_BWd + tokens_BW[..., None]

        def log_probs(self, hidden):
            return (hidden @ torch.ones(4, 20)).log_softmax(-1)

        def to_target_ids(self, ids):
            return ids + 1

    policy = SampledTree()
    with FakeTensorMode(allow_non_fake_inputs=True):
        noise = lambda shape: torch.rand(3, *shape)  # noqa: E731
        seed = DraftSeed(torch.zeros(3, 1, 4), torch.zeros(3, 1, dtype=torch.int64), noise, lambda log_p: log_p)
        flat = policy.draft(Fake(), None, seed).flatten(torch.zeros(3, 1, dtype=torch.int64))
        p_BRV = torch.rand(3, flat.rows, 21)
        decision = accept_sampled(p_BRV, flat, torch.rand(3, 6, 4), torch.rand(3, 6))
    assert decision.rows_BL.shape == decision.published_BL.shape == (3, 6)
