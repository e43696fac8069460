"""The law of sampled text through the whole engine, against exact enumeration; and rules that break it.

The target's next-token law is a table over the last three tokens, so the law of any three output tokens is a finite
sum. The target reads those tokens through the real key/value slots by position, as attention does, and shows the
drafter where it stands by a feature. What is not a table here, engine, trees, verification, commit, is the real code.

One request makes `PLACES` tokens; three windows of three tokens each are tested, so that later rounds and bonus tokens
count. The test of a window: Pearson's chi-square, cells that expect fewer than 10 merged, at level `ALPHA`; and total
variation below its mean plus a deviation that comes up with probability `ALPHA` at most (`variation_bound`).

The slow tests draw 50,000 texts for each policy and law. One core needs 10 to 40 s for each with batches of 8, and 60
to 150 s one by one: about 40 minutes for all 45.

Letters: C contexts, V vocabulary, B sequences, N rows, K key slots, n draws.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch

from eaglelab.decoding import Chain, DynamicTree, Engine, SampledTree, Sampling, StaticTree
from eaglelab.drafters import DrafterConfig, FeatureDrafter, SlotDrafter
from eaglelab.target import FrozenTarget
from eaglelab.target.frozen import RowsOutput
from eaglelab.target.kv import KVSlots
from tests.decoding.wrong_rules import RIGHT, WRONG
from tests.oracles.scripted import tiny_llama

ALPHA = 1e-6
VOCAB, ORDER, PLACES = 5, 3, 5
CONTEXTS = VOCAB**ORDER
PROMPT = [1, 4, 2]
DRAFT_IDS = torch.tensor([3, 0, 4, 1])  # the drafter cannot propose token 2
WINDOWS = range(PLACES - ORDER + 1)
POLICIES = {
    "none": None,
    "chain": Chain(2),
    "static": StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "dynamic": DynamicTree(width=3, depth=3, budget=8),
    "sampled": SampledTree([3, 2]),
}


class TableTarget:
    """As much of a target as the engine asks for; the feature of a row is the number of its last three tokens."""

    device, max_positions, eos_token_ids, kv_row_bytes = torch.device("cpu"), 64, frozenset(), None

    def __init__(self, logits_CV):
        self.logits_CV = logits_CV
        self.weight = torch.tensor([1.0, VOCAB, VOCAB**2, 0.0])  # of the token itself, the one before, ...

    def new_cache(self, batch, capacity, *, room=None):
        return KVSlots(batch, capacity, ((1, 1, 1, 1),), room=room)  # keys hold tokens, values positions

    def forward_rows(
        self,
        tokens_BN,
        position_BN,
        cache,
        *,
        ancestor_BNN=None,
        taps=(),
        count_B=None,
        logits="all",
        planned=lambda: None,
        compiled=False,
    ):
        plan = cache.begin(tokens_BN.shape[1], count_B, self.device)
        tokens_BGNh, position_BGNh = tokens_BN.float()[:, None, :, None], position_BN.float()[:, None, :, None]
        token_BK, position_BK = (x[:, 0, :, 0] for x in cache.update(tokens_BGNh, position_BGNh, 0))
        back_BNK = (position_BN[:, :, None] - position_BK[:, None]).long()
        seen_BNK = plan.visibility(ancestor_BNN) & (back_BNK >= 0) & (back_BNK < ORDER)
        weight_BNK = self.weight[back_BNK.where(seen_BNK, torch.tensor(ORDER))]
        context_BN = (weight_BNK * token_BK[:, None]).sum(-1).long()
        if plan.real_BN is not None:
            context_BN = context_BN.masked_fill(~plan.real_BN, 0)
        planned()
        features = {tap: context_BN[..., None].float() for tap in taps}
        if logits == "last":
            context_BN = context_BN.gather(1, torch.tensor(plan.counts)[:, None] - 1)
        return RowsOutput(self.logits_CV[context_BN], features)


class TableDrafter:
    """Its hidden state is the number of the last three tokens, from the target's feature or the parent's state."""

    taps, max_positions = ("final",), 64

    def __init__(self, log_q_CV):
        self.log_q_CV = log_q_CV

    def new_state(self, batch, capacity, room=None):
        return ()

    def extend(self, state, features_BNF, tokens_BN, position_BN, counts=None):
        return self.step(state, features_BNF, tokens_BN, position_BN, None)

    def step(self, state, hidden_BWd, tokens_BW, position_BW, ancestor_BWP):
        return (hidden_BWd * VOCAB + tokens_BW[..., None]) % CONTEXTS

    def join(self, *args): ...

    select = truncate = discard = join

    def log_probs(self, hidden):
        return self.log_q_CV[hidden[..., 0].long()]

    def to_target_ids(self, draft_ids):
        return DRAFT_IDS[draft_ids]


def tables(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits_CV = torch.randn(CONTEXTS, VOCAB, generator=generator) * 1.6
    close_CV = logits_CV[:, DRAFT_IDS] + 1.2 * torch.randn(CONTEXTS, len(DRAFT_IDS), generator=generator)
    return logits_CV, close_CV.log_softmax(-1)


LOGITS_CV, LOG_Q_CV = tables()


def processed(logits, one):
    """Logits [..., V] -> the law after temperature, top-k and top-p, in plain words: float64, row by row."""
    p = np.exp(logits.double().numpy() / one.temperature)
    for p_V in p.reshape(-1, VOCAB):
        order = np.argsort(-p_V)
        p_V[order[one.top_k or VOCAB :]] = 0
        mass = p_V[order].cumsum() / p_V.sum()
        enough = int((mass < one.top_p).sum()) + 1 if one.top_p < 1 else VOCAB  # the fewest that hold top_p
        p_V[order[enough:]] = 0
        p_V /= p_V.sum()
    return p


def joint(one, first):
    """P(output tokens first, first + 1, first + 2), [V ** 3], by summing over all texts."""
    p_CV = processed(LOGITS_CV, one)
    chance_C = np.zeros(CONTEXTS)  # of the last three tokens
    chance_C[np.polyval(PROMPT, VOCAB)] = 1
    for _ in range(first + ORDER):
        step_CV = chance_C[:, None] * p_CV  # [abc, d] -> bcd
        chance_C = step_CV.reshape(VOCAB, VOCAB ** (ORDER - 1) * VOCAB).sum(0)
    return chance_C


def texts(policy, one, draws, batch):
    """Output tokens [n, PLACES] of requests with the seeds one.seed, one.seed + 1, ..."""
    tree = POLICIES[policy]
    engine = Engine(TableTarget(LOGITS_CV), None if tree is None else TableDrafter(LOG_Q_CV), tree)
    results = engine.generate([PROMPT] * draws, max_new_tokens=PLACES, stop_ids=set(), sampling=one, batch=batch)
    accepted = np.mean([sum(result.accepted) for result in results])
    return np.array([result.tokens for result in results]), accepted


def window(text_nP, first):
    """Three tokens as one number."""
    return text_nP[:, first : first + ORDER] @ VOCAB ** np.arange(ORDER)[::-1]


def chi_square(counts, law):
    """p-value; the smallest cells are merged until they expect 10. 0 where an impossible outcome came up."""
    if counts[law == 0].any():
        return 0.0
    order = np.argsort(law)
    expected = (law * counts.sum())[order]
    merged = int(np.searchsorted(expected.cumsum(), 10)) + 1
    merged = max(merged, int(np.searchsorted(expected, 10)))
    wanted = np.append(expected[:merged].sum(), expected[merged:])
    seen = np.append(counts[order][:merged].sum(), counts[order][merged:])
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    half = torch.tensor([(len(wanted) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def variation(counts, law):
    return float(np.abs(counts / counts.sum() - law).sum() / 2)


def variation_bound(law, draws):
    """Exceeded by the total variation of `draws` draws from `law` with probability ALPHA at most.

    The mean: E|c/n - p| <= sqrt(Var(c/n)) = sqrt(p (1 - p) / n) per cell, halved and summed. The deviation: one draw
    moves two cells by 1/n, the total variation by at most 1/n, so P(TV - E TV >= t) <= exp(-2 n t^2) (McDiarmid).
    """
    mean = np.sqrt(law * (1 - law) / draws).sum() / 2
    return float(mean + math.sqrt(math.log(1 / ALPHA) / (2 * draws)))


def evidence(text_nP, one):
    """Smallest p-value of the windows, and the largest total variation as a share of its bound."""
    laws = [(np.bincount(window(text_nP, first), minlength=CONTEXTS), joint(one, first)) for first in WINDOWS]
    worst = min(chi_square(counts, law) for counts, law in laws)
    return worst, max(variation(counts, law) / variation_bound(law, len(text_nP)) for counts, law in laws)


# ---- the law of every policy -------------------------------------------------------------------------------------

DRAWS, BATCH = 4000, 250
FAST = {
    "none": Sampling(temperature=1.0, top_p=0.85, seed=10_000),
    "chain": Sampling(temperature=1.0, top_k=3, seed=20_000),
    "static": Sampling(temperature=0.5, seed=30_000),
    "dynamic": Sampling(temperature=1.5, top_k=4, top_p=0.9, seed=40_000),
    "sampled": Sampling(temperature=1.5, top_p=0.9, seed=50_000),
}


@cache
def plain_texts(one, draws):
    return texts("none", one, draws, 1000)[0]


def check(policy, one, draws, batch):
    text_nP, accepted = texts(policy, one, draws, batch)
    p_value, share = evidence(text_nP, one)
    assert p_value > ALPHA
    assert share < 1
    assert (accepted > 0.7) == (policy != "none"), "a tree that is never accepted tests nothing"
    if policy in ("chain", "static", "dynamic"):
        assert (text_nP == plain_texts(one, draws)).all(), (
            "with a deterministic tree the text is that of plain sampling"
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_text_has_the_law_of_the_target(policy):
    check(policy, FAST[policy], DRAWS, BATCH)


GRID = {
    f"T={temperature} {name}": Sampling(temperature=temperature, seed=1_000_000 * place, **truncation)
    for place, (temperature, (name, truncation)) in enumerate(
        (temperature, item)
        for temperature in (0.5, 1.0, 1.5)
        for item in {"top-k": {"top_k": 3}, "top-p": {"top_p": 0.9}}.items()
    )
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("one", GRID)
@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_text_has_the_law_of_the_target_in_batches_of_8(policy, one):
    check(policy, GRID[one], 50_000, 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("one", ["T=0.5 top-k", "T=1.0 top-p", "T=1.5 top-p"])
@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_text_has_the_law_of_the_target_one_by_one(policy, one):
    check(policy, GRID[one], 50_000, 1)


# ---- a real target and its drafter -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["static", "sampled"])
def test_sampled_text_has_the_law_of_a_real_model(policy):
    """Law by one uncached forward of the library's model over all texts."""
    target, one = FrozenTarget(tiny_llama(VOCAB)), Sampling(temperature=1.5, top_p=0.9, seed=60_000)
    torch.manual_seed(1)
    network = FeatureDrafter(DrafterConfig.from_target(target.text_config))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    engine = Engine(target, SlotDrafter(network, target, ("final",)), POLICIES[policy])
    results = engine.generate([PROMPT] * 3000, max_new_tokens=PLACES, stop_ids=set(), sampling=one, batch=BATCH)

    text_nP = np.array(list(itertools.product(range(VOCAB), repeat=PLACES)))
    with torch.no_grad():
        ids = torch.tensor([PROMPT + text for text in text_nP[:, :-1].tolist()])
        p_nPV = processed(target.model(ids, use_cache=False).logits[:, len(PROMPT) - 1 :], one)
    chance_n = np.take_along_axis(p_nPV, text_nP[..., None], axis=-1)[..., 0].prod(1)
    drawn_nP = np.array([result.tokens for result in results])
    for first in WINDOWS:
        law = np.bincount(window(text_nP, first), weights=chance_n, minlength=CONTEXTS)
        counts = np.bincount(window(drawn_nP, first), minlength=CONTEXTS)
        assert chi_square(counts, law) > ALPHA
        assert variation(counts, law) < variation_bound(law, len(drawn_nP))
    assert np.mean([sum(result.accepted) for result in results]) > 0.7


# ---- the same test on wrong rules --------------------------------------------------------------------------------

HOT = FAST["sampled"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if WRONG[name].draws > DRAWS else name for name in WRONG]
)
def test_wrong_rules_are_rejected(name, monkeypatch):
    rule = WRONG[name]
    rule.apply(monkeypatch)
    p_value, _ = evidence(texts(rule.policy, HOT, rule.draws, BATCH)[0], HOT)
    assert p_value < ALPHA


@pytest.mark.parametrize("name", RIGHT)
def test_other_right_rules_are_not(name, monkeypatch):
    RIGHT[name].apply(monkeypatch)
    p_value, share = evidence(texts(RIGHT[name].policy, HOT, DRAWS, BATCH)[0], HOT)
    assert p_value > ALPHA
    assert share < 1
