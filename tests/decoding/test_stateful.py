"""The engine's committed state under any sequence of operations, against a model that recomputes it from nothing.

The model knows the target as one uncached forward of the library per context. After every operation each sequence's
tokens, K/V, features, draft rows and reason to stop must be those of its own text alone.
"""

import functools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eaglelab.decoding import Chain, DynamicTree, Engine, SampledTree, Sampling, StaticTree
from eaglelab.decoding.admission import requests_for
from eaglelab.decoding.transaction import Transaction
from eaglelab.target import FrozenTarget
from tests.decoding.test_transaction import interrupted_on_line
from tests.oracles.scripted import ScriptDrafter, drafts, full_logits, tiny_llama

VOCAB, CAPACITY, ROOM, TAPS = 61, 44, 4, (1, "final")


class BreakError(RuntimeError):
    """Thrown into a call on purpose."""


@functools.cache
def world() -> tuple[FrozenTarget, dict]:
    """The target, and its scores of the next token by context."""
    # in double precision: batches of other sizes add in another order, which fp32 shows beyond its fifth digit
    target = FrozenTarget(tiny_llama(VOCAB).double())
    return target, {"target": full_logits(target.model)} | {
        kind: drafts(kind, target.model, VOCAB) for kind in ("perfect", "noisy", "wrong")
    }


@functools.cache
def fresh(tokens: tuple[int, ...]) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Keys and values by layer, and the tapped features, of one forward over the tokens."""
    model = world()[0].model
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=True, output_hidden_states=True)
    layers = [(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers]
    return layers, torch.cat([out.hidden_states[1][0], out.hidden_states[-1][0]], dim=-1)


class Wanted:
    """What one request must publish: the target's own text, token by token, until a rule ends it."""

    def __init__(self, prompt: list[int], new: int, stops: frozenset[int], sampling: Sampling) -> None:
        self.text, self.reason = list(prompt), None
        most = min(len(prompt) + new, CAPACITY)
        while self.reason is None:
            place = len(self.text) - len(prompt)
            self.text.append(self._next(sampling, place))
            if len(self.text) == most:
                self.reason = "length" if len(prompt) + new <= CAPACITY else "context"
            if self.text[-1] in stops:
                self.reason = "eos"

    def _next(self, sampling: Sampling, place: int) -> int:
        logits_V = world()[1]["target"](tuple(self.text)).double()
        if sampling.greedy:
            return int(logits_V.argmax())
        drawn = np.random.default_rng(sampling.seed).random(place + 1)[place]
        summed_V = (logits_V / sampling.temperature).softmax(-1).cumsum(-1)
        return int((summed_V <= drawn * summed_V[-1]).sum())


paths = st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=5).map(
    lambda lists: sorted({tuple(one[:n]) for one in lists for n in range(1, len(one) + 1)}) or [(0,)]
)
trees = st.one_of(
    st.integers(1, 5).map(Chain),
    paths.map(StaticTree),
    st.builds(DynamicTree, st.integers(1, 4), st.integers(1, 4), st.integers(1, 9)),
    st.just(SampledTree([2, 1])),
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
asked = st.tuples(
    prompts,
    st.one_of(st.integers(1, 12), st.integers(12, 45)),
    st.frozensets(st.integers(0, VOCAB - 1), max_size=4),
    st.builds(Sampling, temperature=st.sampled_from([0.0, 0.0, 0.0, 0.8]), seed=st.integers(0, 99)),
)
requests = st.lists(asked, min_size=1, max_size=ROOM)
PLACES = [("extend", 1), ("step", 1), ("step", 2), ("log_probs", 2), ("discard", 2), ("before", 1), ("after", 1)]
PLACES += [("commit", 1)] * 2


class Decoding(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(["perfect", "perfect", "perfect", "noisy", "wrong"]), tree=trees, first=requests)
    def begin(self, kind, tree, first):
        target, scores = world()
        self.drafter = ScriptDrafter(scores[kind], [], taps=TAPS)
        self.engine = Engine(target, self.drafter, tree, capacity=CAPACITY)
        self.wanted: dict[int, Wanted] = {}
        self.exact: dict[int, bool] = {}
        self.cancelled: set[int] = set()
        self.state = None
        self.admit(first)

    # ---- operations -----------------------------------------------------------------------------------------

    @rule(asked=st.lists(asked, min_size=1, max_size=2))
    def admit(self, asked):
        """New requests join, or start a state where none runs."""
        if self.state is not None:
            self.retire()
        here = 0 if self.state is None else self.state.batch
        state = self.prefilled(asked[: ROOM - here])
        if state is not None and self.state is not None:
            self.state.join(state, self.drafter)
        elif state is not None:
            self.state = state

    @precondition(lambda self: self.state is not None and self.state.batch < ROOM)
    @rule(one=asked, where=st.sampled_from(["extend", "forward"]))
    def admit_fails(self, one, where):
        """A prompt whose prefill breaks leaves the others alone."""
        if not self.retire():
            return
        with pytest.MonkeyPatch.context() as patch:
            if where == "extend":
                self.break_call(patch, "extend", 1)
            else:
                self.break_call(patch, "after", 1)
            with pytest.raises(BreakError):
                self.prefilled([one])
        for number in [number for number in self.wanted if all(r.number != number for r in self.state.requests)]:
            del self.wanted[number]

    @precondition(lambda self: self.state is not None)
    @rule(tree=trees)
    def another_tree(self, tree):
        self.engine.tree = tree

    @precondition(lambda self: self.state is not None)
    @rule(count=st.integers(1, 3))
    def rounds(self, count):
        for _ in range(count):
            if self.state is None or not self.retire():
                return
            before = self.texts()
            self.check_records(self.engine.round(self.state), before)
            self.every_sequence_is_its_own_text()

    @precondition(lambda self: self.state is not None)
    @rule(place=st.sampled_from(PLACES))
    def round_fails(self, place):
        """An exception in any call of a round: nothing was published, and the next round may follow."""
        if not self.retire():
            return
        before, (where, nth) = self.texts(), place
        with pytest.MonkeyPatch.context() as patch:
            self.break_call(patch, where, nth)
            try:
                records = self.engine.round(self.state)
            except BreakError:
                records = None
        if records is None and where == "discard":  # called on leaving, when all is published
            self.next_transaction()
        elif records is None:
            assert self.texts() == before
        if records is not None:
            self.check_records(records, before)

    @precondition(lambda self: self.state is not None)
    @rule(line=st.integers(0, 160))
    def round_is_interrupted(self, line):
        """Ctrl-C on any line: the old state or the new one."""
        if self.retire():
            self.note_sampling()
            interrupted_on_line(line, lambda: self.engine.round(self.state))
            self.next_transaction()

    @precondition(lambda self: self.state is not None)
    @rule(place=st.integers(0, ROOM - 1))
    def cancel(self, place):
        request = self.state.requests[place % self.state.batch]
        if request.stop_reason is None:
            request.stop_reason = "cancelled"
            self.cancelled.add(request.number)

    @precondition(lambda self: self.state is not None)
    @rule()
    def leave(self):
        self.retire()

    # ---- what must hold -------------------------------------------------------------------------------------

    @invariant()
    def every_sequence_is_its_own_text(self):
        if getattr(self, "state", None) is None:
            return
        state = self.state
        assert len(state.requests) == state.batch == len(state.cache.lengths) == len(state.draft)
        for b, request in enumerate(state.requests):
            n = len(request.tokens) - 1
            assert state.cache.lengths[b] == int(state.length_B1[b]) == n
            assert int(state.frontier_B1[b]) == request.tokens[-1]
            self.check_text(request)
            layers, features = fresh(tuple(request.tokens[:n]))
            for layer, (keys, values) in enumerate(layers):
                slots = [pool[b, :, :n] for pool in state.cache.slots(layer)]
                torch.testing.assert_close(slots[0], keys, atol=1e-6, rtol=1e-6)
                torch.testing.assert_close(slots[1], values, atol=1e-6, rtol=1e-6)
            self.check_draft_rows(b, request, features)

    def check_text(self, request):
        wanted = self.wanted[request.number]
        if self.exact[request.number]:
            assert request.tokens == wanted.text[: len(request.tokens)]
            if request.number not in self.cancelled:
                assert request.stop_reason == (wanted.reason if len(request.tokens) == len(wanted.text) else None)

    def check_draft_rows(self, b, request, features):
        """The drafter's rows and the pending ones are the prefix, each once (while the sequence drafts)."""
        if not request.drafting:
            return
        mine, pending = self.state.draft[b], self.state.pending
        kept, tokens = list(mine.features), list(mine.tokens)
        if pending is not None and pending.counts[b]:
            count, start = pending.counts[b], pending.starts[b]
            kept, tokens = kept[:start], tokens[: start + 1]  # an interrupt may strike between extending and clearing
            position_N = pending.position_BN.expand(self.state.batch, -1)[b]
            assert position_N[:count].tolist() == list(range(start, start + count))
            kept += list(pending.features_BNF[b, :count])
            tokens += pending.tokens_BN[b, :count].tolist()
        assert tokens == request.tokens
        torch.testing.assert_close(torch.stack(kept), features, atol=1e-6, rtol=1e-6)
        assert mine.nodes == []

    def check_records(self, records, before):
        assert [record.request for record in records] == [request.number for request in self.state.requests]
        for record, request in zip(records, self.state.requests, strict=True):
            assert before[record.request] + record.published_tokens == request.tokens
            assert record.published == len(record.published_tokens) in (record.accepted, record.accepted + 1)
            assert record.accepted <= record.drafted <= self.engine.tree.max_nodes
            assert record.stop_reason == request.stop_reason

    # ---- helpers --------------------------------------------------------------------------------------------

    def prefilled(self, asked):
        """A state of new requests; None where they leave no room for a token."""
        asked = [one for one in asked if len(one[0]) < CAPACITY]
        if not asked:
            return None
        requests = []
        for prompt, new, stops, sampling in asked:
            (request,) = requests_for(
                world()[0], [prompt], max_new_tokens=new, stop_ids=stops, sampling=[sampling], capacity=CAPACITY
            )
            request.number = len(self.exact)
            self.wanted[request.number] = Wanted(prompt, new, stops, sampling)
            self.exact[request.number] = True
            requests.append(request)
        self.drafter.first = [request.tokens[0] for request in requests]
        return self.engine._prefilled(requests, CAPACITY, ROOM if self.state is None else None)

    def retire(self) -> bool:
        """Take stopped requests out; whether one still runs."""
        self.state.retire(self.drafter)
        if not any(self.state.running):
            self.state = None
            return False
        self.note_sampling()
        return True

    def next_transaction(self):
        """What the next round does first: drop what an interrupted one left behind."""
        with Transaction(self.state, self.drafter):
            pass

    def note_sampling(self):
        """A sampled tree keeps the law of the text, not the text."""
        if self.engine.tree.samples:
            for request in self.state.requests:
                self.exact[request.number] &= request.sampling.greedy

    def texts(self):
        return {request.number: list(request.tokens) for request in self.state.requests}

    def break_call(self, patch, where, nth):
        target = world()[0]
        holder, name = {
            "before": (target, "forward_rows"),
            "after": (target, "forward_rows"),
            "commit": (self.state.cache, "commit"),
        }.get(where, (self.drafter, where))
        real, calls = getattr(holder, name), []

        def broken(*args, **kwargs):
            calls.append(None)
            if len(calls) == nth and where != "after":
                raise BreakError(where)
            result = real(*args, **kwargs)
            if len(calls) == nth:
                raise BreakError(where)
            return result

        patch.setattr(holder, name, broken)


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestDecoding = Decoding.TestCase
TestDecoding.settings = settings(max_examples=40, stateful_step_count=20, **QUIET)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_more_sequences_of_operations():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Decoding, settings=settings(max_examples=600, stateful_step_count=40, **QUIET))
