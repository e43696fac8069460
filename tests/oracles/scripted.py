"""Slow, literal references for decoding: a drafter that thinks in tokens, and a round simulator.

Nothing here uses the engine, the trees or the cache under test.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

Context = tuple[int, ...]
Predict = Callable[[Context], torch.Tensor]  # tokens so far -> scores of the next one, [Vd]


def tiny_llama(vocab: int = 61, *, seed: int = 0, layers: int = 2, positions: int = 512):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.35,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def hf_greedy(model, prompt: Sequence[int], max_new: int, eos: Sequence[int] = ()) -> list[int]:
    """The library's own greedy decoding."""
    ids = torch.tensor([list(prompt)])
    config = GenerationConfig(max_new_tokens=max_new, do_sample=False, eos_token_id=list(eos) or None, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[0, len(prompt) :].tolist()


def full_logits(model) -> Predict:
    """One uncached forward per context."""

    @functools.cache
    def predict(context: Context) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([context]), use_cache=False).logits[0, -1]

    return predict


def noise(vocab: int, salt: int = 0) -> Predict:
    @functools.cache
    def predict(context: Context) -> torch.Tensor:
        seed = zlib.crc32(repr((salt, context)).encode())
        return torch.randn(vocab, generator=torch.Generator().manual_seed(seed))

    return predict


def drafts(kind: str, model, vocab: int) -> Predict:
    """Named drafters: perfect and wrong rank tokens by the target, forwards and backwards."""
    target, random = full_logits(model), noise(vocab)
    return {
        "perfect": target,
        "wrong": lambda context: -target(context),
        "random": random,
        "noisy": lambda context: target(context) + 2.5 * random(context),
    }[kind]


@dataclass
class ScriptState:
    tokens: list[int]  # x_0, then the token of every kept row
    features: list[torch.Tensor] = field(default_factory=list)
    seed: torch.Tensor | None = None
    nodes: list[tuple[Context, torch.Tensor]] = field(default_factory=list)  # path, output


class ScriptDrafter:
    """A drafter whose hidden state is its scores, and which checks every argument it is given.

    Its state is one `ScriptState` per sequence.

    Args:
        predict: scores over the draft vocabulary.
        first: x_0, which no draft row carries; a list of them in the order in which sequences come.
        target_ids: draft id -> target id.
        fail: {"extend" | "step" | "log_probs": call number that raises}, counted from 1.
    """

    def __init__(self, predict, first, *, taps=("final",), max_positions=10**6, target_ids=None):
        self.predict, self.first = predict, first
        self.taps, self.max_positions = taps, max_positions
        self.target_ids = target_ids
        self.fail: dict[str, int] = {}
        self.calls = {"extend": 0, "step": 0, "log_probs": 0}
        self.highest_position = -1

    def _called(self, name):
        self.calls[name] += 1
        if self.fail.get(name) == self.calls[name]:
            raise RuntimeError(f"scripted failure in {name}")

    def new_state(self, batch, capacity, room=None):
        if isinstance(self.first, int):
            return [ScriptState([self.first]) for _ in range(batch)]
        firsts, self.first = self.first[:batch], self.first[batch:]
        assert len(firsts) == batch
        return [ScriptState([first]) for first in firsts]

    def join(self, state, other):
        assert not any(one.nodes for one in [*state, *other])
        state.extend(other)

    def select(self, state, order):
        state[:] = [state[b] for b in order]

    def extend(self, state, features_BNF, tokens_BN, position_BN, counts=None):
        self._called("extend")
        B, N = tokens_BN.shape
        counts = [N] * B if counts is None else counts
        assert len(state) == B == len(counts)
        outputs = [
            self._extend_one(state[b], features_BNF[b], tokens_BN[b], position_BN.expand(B, -1)[b], counts[b])
            for b in range(B)
        ]
        like = next(rows[0] for rows in outputs if rows)
        unused = torch.full_like(like, float("nan"))
        return torch.stack([torch.stack(rows + [unused] * (N - len(rows))) for rows in outputs])

    def _extend_one(self, state, features_NF, tokens_N, position_N, count):
        assert not state.nodes, "tree rows were kept between rounds"
        start = len(state.tokens) - 1
        assert position_N[:count].tolist() == list(range(start, start + count))
        outputs = []
        for token in tokens_N[:count].tolist():
            state.tokens.append(token)
            outputs.append(self.predict(tuple(state.tokens)))
        state.features += list(features_NF[:count].clone())
        state.seed = outputs[-1] if outputs else state.seed
        if count:
            self.highest_position = max(self.highest_position, start + count - 1)
        assert self.highest_position < self.max_positions
        return outputs

    def truncate(self, state, lengths):
        for one, length in zip(state, lengths, strict=True):
            one.features = one.features[:length]
            one.tokens = one.tokens[: length + 1]

    def step(self, state, hidden_BWd, tokens_BW, position_BW, ancestor_BWP=None):
        B, W, before = len(state), tokens_BW.shape[1], len(state[0].nodes)
        if ancestor_BWP is None:
            assert W == 1
            ancestor_BWP = torch.ones(B, 1, before + 1, dtype=torch.bool)
        assert ancestor_BWP.shape == (B, W, before + W)
        assert ancestor_BWP.dtype == torch.bool
        new = [self._step_one(state[b], hidden_BWd[b], tokens_BW[b], position_BW[b], ancestor_BWP[b]) for b in range(B)]
        self._called("step")
        for one, nodes in zip(state, new, strict=True):
            one.nodes += nodes
        return torch.stack([torch.stack([output for _, output in nodes]) for nodes in new])

    def _step_one(self, state, hidden_Wd, tokens_W, position_W, ancestor_WP):
        before, new = len(state.nodes), []
        unseeded = bool(hidden_Wd.isnan().any())
        for w, token in enumerate(tokens_W.tolist()):
            sees = ancestor_WP[w].nonzero().flatten().tolist()
            assert sees[-1] == before + w, "a node sees itself last, and no later sibling"
            earlier = [state.nodes[row][0] for row in sees[:-1]]
            path = (earlier[-1] if earlier else ()) + (token,)
            assert earlier == [path[:length] for length in range(1, len(path))]
            parent = state.nodes[sees[-2]][1] if earlier else state.seed
            idle = len(state.tokens) > 2 and int(position_W[w]) == len(path)
            if not (unseeded or idle):  # a sequence that no longer drafts is carried along, its root at position 0
                assert position_W[w].item() == len(state.tokens) - 2 + len(path)
                assert torch.equal(hidden_Wd[w], parent)
                self.highest_position = max(self.highest_position, int(position_W[w]))
                assert self.highest_position < self.max_positions
            new.append((path, self.predict((*state.tokens, *path))))
        return new

    def discard(self, state):
        for one in state:
            one.nodes = []

    def log_probs(self, hidden):
        self._called("log_probs")
        return hidden.float().log_softmax(-1)

    def to_target_ids(self, draft_ids):
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]


@dataclass
class SimulatedRound:
    drafted: int
    accepted: int
    published: list[int]


def simulate(
    target: Predict,
    predict: Predict,
    prompt: Sequence[int],
    paths: Sequence[Sequence[int]],
    max_new: int,
    eos: Sequence[int] = (),
    target_ids=None,
) -> tuple[list[int], list[SimulatedRound]]:
    """Greedy speculative decoding in the plainest form: whole contexts, one forward each."""
    context = [*prompt, int(target(tuple(prompt)).argmax())]
    limit = len(prompt) + max_new
    rounds: list[SimulatedRound] = []
    while len(context) < limit and context[-1] not in eos:
        nodes: dict[Context, Context] = {(): ()}  # ranks -> tokens
        if limit - len(context) > 1:
            for path in sorted((tuple(p) for p in paths), key=len):
                parent = nodes[path[:-1]]
                order = predict((*context, *parent)).argsort(descending=True)
                token = int(order[path[-1]])
                token = token if target_ids is None else int(target_ids[token])
                nodes[path] = (*parent, token)
        at: Context = ()
        while True:
            wanted = (*nodes[at], int(target((*context, *nodes[at])).argmax()))
            step = [p for p, t in nodes.items() if t == wanted and p[:-1] == at and p]
            if not step:
                break
            (at,) = step
        candidates = list(wanted)
        published: list[int] = []
        for token in candidates:
            published.append(token)
            context.append(token)
            if token in eos or len(context) == limit:
                break
        accepted = min(len(published), len(candidates) - 1)
        rounds.append(SimulatedRound(len(nodes) - 1, accepted, published))
    return context[len(prompt) :], rounds
