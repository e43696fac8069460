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

    Args:
        predict: scores over the draft vocabulary.
        first: x_0, which no draft row carries.
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

    def new_state(self, batch, capacity):
        assert batch == 1
        return ScriptState([self.first])

    def extend(self, state, features_BNF, tokens_BN, position_BN, counts=None):
        assert not state.nodes, "tree rows were kept between rounds"
        count = tokens_BN.shape[1] if counts is None else counts[0]
        start = len(state.tokens) - 1
        assert position_BN[0, :count].tolist() == list(range(start, start + count))
        self._called("extend")
        outputs = []
        for token in tokens_BN[0, :count].tolist():
            state.tokens.append(token)
            outputs.append(self.predict(tuple(state.tokens)))
        state.features += list(features_BNF[0, :count].clone())
        state.seed = outputs[-1]
        self.highest_position = max(self.highest_position, start + count - 1)
        assert self.highest_position < self.max_positions
        return torch.stack(outputs)[None]

    def step(self, state, hidden_BWd, tokens_BW, position_BW, ancestor_BWP=None):
        W, before = tokens_BW.shape[1], len(state.nodes)
        if ancestor_BWP is None:
            assert W == 1
            ancestor_BWP = torch.ones(1, 1, before + 1, dtype=torch.bool)
        assert ancestor_BWP.shape == (1, W, before + W)
        assert ancestor_BWP.dtype == torch.bool
        new = []
        for w, token in enumerate(tokens_BW[0].tolist()):
            sees = ancestor_BWP[0, w].nonzero().flatten().tolist()
            assert sees[-1] == before + w, "a node sees itself last, and no later sibling"
            earlier = [state.nodes[row][0] for row in sees[:-1]]
            path = (earlier[-1] if earlier else ()) + (token,)
            assert earlier == [path[:length] for length in range(1, len(path))]
            assert position_BW[0, w].item() == len(state.tokens) - 2 + len(path)
            parent = state.nodes[sees[-2]][1] if earlier else state.seed
            assert torch.equal(hidden_BWd[0, w], parent)
            new.append((path, self.predict((*state.tokens, *path))))
        self._called("step")
        self.highest_position = max(self.highest_position, int(position_BW.max()))
        assert self.highest_position < self.max_positions
        state.nodes += new
        return torch.stack([output for _, output in new])[None]

    def discard(self, state):
        state.nodes = []

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
