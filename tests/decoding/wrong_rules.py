"""Deliberately wrong ways to verify and to sample, each put in place at run time.

Every one of them gives plausible text, and greedy decoding does not notice any. ``test_statistics`` must reject them
with the very test that the right rules pass. `RIGHT` holds other right rules, which it must not reject.

Letters: B sequences, R flat rows, L levels of a tree, K children of a row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from eaglelab.decoding import engine as engine_module
from eaglelab.decoding import residual as rule
from eaglelab.decoding import sampling as law
from eaglelab.decoding.engine import Engine
from eaglelab.decoding.policies import sampled
from eaglelab.decoding.sampling import Sampling, Stream
from eaglelab.decoding.verify import Decision

PROMPT_LENGTH = 3
_noise, _at, _round = law.noise, Stream.at, Stream.round
Apply = Callable[..., None]  # pytest's monkeypatch -> None


@dataclasses.dataclass(frozen=True)
class Rule:
    """`policy` names the tree that the rule is used with, `draws` how many texts it takes to notice."""

    policy: str
    apply: Apply
    draws: int = 2500


RIGHT: dict[str, Rule] = {}
WRONG: dict[str, Rule] = {}


def patch(owner: object, name: str, value: object) -> Apply:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


# ---- which distribution a token is drawn from --------------------------------------------------------------------


def rescored(change: Callable) -> Apply:
    """`change(logits, flat, settings, prefixes, scores)` gives the scores instead of the processors."""
    real = law.processed

    def processed(logits_BRV, flat, settings, prefixes):
        return change(logits_BRV, flat, settings, prefixes, real(logits_BRV, flat, settings, prefixes))

    return patch(law, "processed", processed)


def without(settings, **off):
    return [dataclasses.replace(one, **off) for one in settings]


def bonus_unprocessed(logits_BRV, flat, settings, prefixes, scores_BRV):
    if not flat.nodes:
        return scores_BRV
    return torch.where(flat.topology.leaf_BR[..., None], logits_BRV.float(), scores_BRV)


def bonus_at_temperature_1(logits_BRV, flat, settings, prefixes, scores_BRV):
    if not flat.nodes:
        return scores_BRV
    cold_BRV = law._warp(logits_BRV.float(), without(settings, temperature=1.0))
    return torch.where(flat.topology.leaf_BR[..., None], cold_BRV, scores_BRV)


def first_token_unprocessed(logits_BRV, flat, settings, prefixes, scores_BRV):
    """Where the text so far is the prompt of `test_statistics`."""
    return logits_BRV.float() if len(prefixes[0]) == PROMPT_LENGTH - 1 else scores_BRV


def target_without_top_p(logits_BRV, flat, settings, prefixes, scores_BRV):
    return law._warp(logits_BRV.float(), without(settings, top_p=1.0))


def rows_of_the_parents(logits_BRV, flat, settings, prefixes, scores_BRV):
    return scores_BRV[:, flat.topology.parent_BR[0]]


def reversed_warpers(monkeypatch):
    real = Sampling.warpers.func
    backwards = cached_property(lambda self: real(self)[::-1])
    backwards.__set_name__(Sampling, "warpers")
    monkeypatch.setattr(Sampling, "warpers", backwards)


WRONG |= {
    "bonus token from the unprocessed distribution": Rule("static", rescored(bonus_unprocessed)),
    "temperature skipped after an accepted path": Rule("sampled", rescored(bonus_at_temperature_1)),
    "first token from the unprocessed distribution": Rule("none", rescored(first_token_unprocessed)),
    "top-p for the draft, not for the target": Rule("sampled", rescored(target_without_top_p)),
    "top-p before the temperature": Rule("dynamic", reversed_warpers),
    "distribution of the parent's row": Rule("sampled", rescored(rows_of_the_parents)),
}


# ---- trees of most likely children, verified one child after the other -----------------------------------------------


def reciting(accept: Callable, reject: Callable) -> Apply:
    """Literal verification of one sequence at a time.

    Children are tried in order. `accept(p, x, q)` is the probability of taking child x, where q is its draft
    probability; `reject(p, x)` is what is left of p after a rejection.
    """

    def decide(self, state, logits_BRV, flat, drafted, drafting, generators):
        settings = [request.sampling for request in state.requests]
        scores_BRV = law.processed(logits_BRV, flat, settings, [request.tokens[:-1] for request in state.requests])
        p_BRV = law.distribution(scores_BRV, settings).double().numpy()
        L = flat.topology.path_BRL.shape[-1]
        q_BR = torch.zeros(flat.tokens_BR.shape) if flat.log_values_BR is None else flat.log_values_BR
        above_BR = q_BR.gather(1, flat.topology.parent_BR.expand(q_BR.shape))
        q_BR = (q_BR - above_BR).exp().tolist()
        parents_BR = flat.topology.parent_BR.expand(len(q_BR), -1).tolist()
        lines = []
        for b, (request, tokens) in enumerate(zip(state.requests, flat.tokens_BR.tolist(), strict=True)):
            numbers = iter(np.random.default_rng([request.sampling.seed, request.place, 7]).random(4 * L + 1))
            rows, published = [0], []
            while True:
                p, taken = p_BRV[b, rows[-1]], None
                children = [r for r in range(1, flat.rows) if parents_BR[b][r] == rows[-1] and tokens[r] >= 0]
                for row in children:
                    if next(numbers) < accept(p, tokens[row], q_BR[b][row]):
                        taken = row
                        break
                    p = reject(p, tokens[row])
                if taken is None:
                    break
                rows.append(taken)
                published.append(tokens[taken])
            published.append(int(np.searchsorted(np.cumsum(p), next(numbers) * p.sum(), side="right")))
            lines.append((len(rows) - 1, rows, published))
        padded = [(n, rows + [0] * (L - n - 1), published + [0] * (L - n - 1)) for n, rows, published in lines]
        return Decision(*(torch.tensor(column) for column in zip(*padded, strict=True)))

    return patch(Engine, "_decide", decide)


def zeroed(p, x):
    left = np.where(np.arange(len(p)) == x, 0.0, p)
    return left if left.any() else p


def residual(p, x):
    return zeroed(p, x) / zeroed(p, x).sum()


def as_it_is(p, x):
    return p


RIGHT |= {
    "draft mass 1, child after child": Rule("static", reciting(lambda p, x, q: p[x], residual)),
    "draft mass 1, child after child, dynamic": Rule("dynamic", reciting(lambda p, x, q: p[x], residual)),
    "nothing accepted": Rule("static", reciting(lambda p, x, q: 0.0, as_it_is)),
}
WRONG |= {
    "min(1, p/q) for the most likely children": Rule("static", reciting(lambda p, x, q: p[x] / q, residual)),
    "rejected child kept": Rule("static", reciting(lambda p, x, q: p[x], as_it_is)),
    "rejected child removed, rest not renormalised": Rule("static", reciting(lambda p, x, q: p[x], zeroed)),
    "most probable token always accepted": Rule(
        "static", reciting(lambda p, x, q: 1.0 if x == p.argmax() else p[x], residual)
    ),
    "probable enough is accepted": Rule("dynamic", reciting(lambda p, x, q: float(p[x] > 0.3), residual)),
    "accepted with p(x), then drawn from p": Rule("chain", reciting(lambda p, x, q: p[x], as_it_is)),
}


# ---- trees of sampled children -----------------------------------------------------------------------------------


def unscaled(p_BV, q_BV):
    left_BV = (p_BV - q_BV).clamp(min=0)
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)


def best_ratio_first(monkeypatch):
    """Siblings in the order of their acceptance, not of the draw."""
    real = rule._try_children

    def sort_then_try(p_BV, q_BV, children_BK, tokens_BR, accept_BK):
        token_BK = tokens_BR.gather(1, children_BK.clamp(min=0))
        ratio_BK = p_BV.gather(1, token_BK) / q_BV.gather(1, token_BK).clamp(min=1e-9)
        order_BK = ratio_BK.masked_fill(children_BK < 0, -1).argsort(dim=1, descending=True)
        return real(p_BV, q_BV, children_BK.gather(1, order_BK), tokens_BR, accept_BK)

    monkeypatch.setattr(rule, "_try_children", sort_then_try)


def most_likely_children(monkeypatch):
    def call(self, log_p_BWV, top_k):
        log_q_BWV = self.warp(log_p_BWV).float().log_softmax(dim=-1)
        self.q.append(log_q_BWV.exp())
        ids_BWK = log_q_BWV.topk(top_k, dim=-1).indices
        return log_p_BWV.gather(-1, ids_BWK), ids_BWK

    monkeypatch.setattr(sampled._WithoutReplacement, "__call__", call)


def q_recorded_at_temperature_1(monkeypatch):
    real = sampled._WithoutReplacement.__call__

    def call(self, log_p_BWV, top_k):
        drawn = real(self, log_p_BWV, top_k)
        self.q[-1] = log_p_BWV.exp()
        return drawn

    monkeypatch.setattr(sampled._WithoutReplacement, "__call__", call)


def renumbered(change: Callable) -> Apply:
    """`change(accept, draw)` gives the two sets of uniform numbers of an acceptance."""
    real = rule.accept_sampled

    def accept(p_BRV, flat, accept_BLK, draw_BL):
        return real(p_BRV, flat, *change(accept_BLK, draw_BL))

    return patch(engine_module, "accept_sampled", accept)


def numbers_again(generators, shape):
    """A round's generators start over for every use: each level of the tree, then acceptance."""
    return _noise([one.manual_seed(one.initial_seed()) for one in generators], shape)


WRONG |= {
    "residual not renormalised": Rule("sampled", patch(rule, "_reduce", unscaled)),
    "residual not reduced": Rule("sampled", patch(rule, "_reduce", lambda p, q: p)),
    "residual |p - q|": Rule("sampled", patch(rule, "_reduce", lambda p, q: rule._normalise((p - q).abs()))),
    "q keeps the rejected child": Rule("sampled", patch(rule, "_without", lambda q, x: q)),
    "accepted with p(x), not p(x)/q(x)": Rule("sampled", patch(rule, "_passes", lambda px, qx, u: u < px)),
    "accepted where p >= q": Rule("sampled", patch(rule, "_passes", lambda px, qx, u: px >= qx)),
    "siblings tried by acceptance": Rule("sampled", best_ratio_first),
    "most likely children taken for drawn ones": Rule("sampled", most_likely_children),
    "q recorded at temperature 1": Rule("sampled", q_recorded_at_temperature_1),
    "one number for acceptance and draw": Rule("sampled", renumbered(lambda a, u: (u[..., None].expand_as(a), u))),
    "one number for all siblings": Rule("sampled", renumbered(lambda a, u: (a[..., :1].expand_as(a), u)), draws=16_000),
    "acceptance by the numbers that drew the tree": Rule("sampled", patch(law, "noise", numbers_again)),
}


# ---- uniform numbers ---------------------------------------------------------------------------------------------

WRONG |= {
    "one number for successive places": Rule(
        "chain", patch(Stream, "at", lambda self, first, count: np.repeat(_at(self, 0, 1), count))
    ),
    "numbers start over in every round": Rule("static", patch(Stream, "at", lambda self, first, n: _at(self, 0, n))),
    "one number for all levels of a round": Rule(
        "dynamic", patch(Stream, "at", lambda self, first, count: np.repeat(_at(self, first, 1), count))
    ),
    "trees drawn with the same numbers in every round": Rule(
        "sampled", patch(Stream, "round", lambda self, place, device: _round(self, 0, device))
    ),
    "eight requests share their numbers": Rule(
        "none", patch(Stream, "at", lambda self, first, count: _at(Stream(self.seed // 8), first, count))
    ),
}
