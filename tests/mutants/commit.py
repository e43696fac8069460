"""What a verification publishes, and what it must forget."""

from __future__ import annotations

import dataclasses

import torch

from tests.mutants.registry import change_forward, mutant

COMMITTED = "tests/decoding/test_batch.py::test_committed_state_of_every_sequence_equals_a_fresh_prefill"
BATCHES = "tests/decoding/test_batch.py::test_a_batch_gives_the_results_of_single_runs"
FRESH = "tests/decoding/test_transaction.py::test_state_after_every_round_equals_a_fresh_prefill"
INTERRUPT = "tests/decoding/test_transaction.py::test_an_interrupt_on_any_line_leaves_the_committed_state_usable"


@mutant("frontier K/V published as if verified", FRESH + "[noisy-static]")
def frontier_published() -> None:
    from eaglelab.target import KVSlots

    commit = KVSlots.commit

    def one_more(self, rows, counts):
        commit(self, rows, counts)
        if rows is not None:
            self.lengths = [length + 1 for length in self.lengths]

    KVSlots.commit = one_more


@mutant("rows committed by token id", "tests/decoding/test_engine.py::test_three_tokens_cannot_be_confused")
def rows_by_token() -> None:
    from eaglelab.decoding import engine, verify

    follow = verify.follow

    def first_of_its_token(chosen_BR, flat):
        decision = follow(chosen_BR, flat)
        tokens_BL = flat.tokens_BR.gather(1, decision.rows_BL)
        same_BLR = flat.tokens_BR[:, None] == tokens_BL[..., None]
        rows_BL = (same_BLR * torch.arange(flat.rows, 0, -1)).argmax(-1)
        return dataclasses.replace(decision, rows_BL=rows_BL)

    engine.follow = verify.follow = first_of_its_token


@mutant(
    "end token inside a path ignored", "tests/decoding/test_engine.py::test_nothing_after_an_end_token_is_published[3]"
)
def end_token_inside() -> None:
    from eaglelab.decoding.state import Request

    admit = Request.admit

    def only_last(self, candidates):
        stops = self.stop_ids
        self.stop_ids = stops if candidates[-1] in stops else frozenset()
        try:
            return admit(self, candidates)
        finally:
            self.stop_ids = stops

    Request.admit = only_last


@mutant(
    "unpublished draft tokens counted as accepted",
    "tests/decoding/test_engine.py::test_max_new_tokens_is_exact_inside_a_path[3-perfect]",
)
def unpublished_counted() -> None:
    from eaglelab.decoding.state import Request

    admit = Request.admit
    Request.admit = lambda self, candidates: dataclasses.replace(admit(self, candidates), accepted=len(candidates) - 1)


@mutant("logits of a padding row for a short prompt", BATCHES + "[chain-sampled]")
def padding_row_answers() -> None:
    from eaglelab.decoding import engine

    def last_of_all(forward, target, *args, **kw):
        output = forward(target, *args, **kw | {"logits": "all"})
        output.logits_BNV = output.logits_BNV[:, -1:]
        return output

    change_forward(engine, "prefill", last_of_all)


@mutant("draft rows of rejected nodes kept", COMMITTED + "[static]")
def rejected_draft_rows_kept() -> None:
    from eaglelab.drafters import SlotDrafter

    def keep(self, state):
        state.lengths = [length + state.provisional for length in state.lengths]
        state.provisional = 0

    SlotDrafter.discard = keep
    SlotDrafter.truncate = lambda self, state, lengths: None


@mutant("draft rows not truncated after an interrupt", INTERRUPT)
def draft_rows_twice() -> None:
    from eaglelab.decoding import Engine

    init = Engine.__init__

    def without_truncate(self, target, drafter=None, *args, **kw):
        init(self, target, drafter, *args, **kw)
        if drafter is not None:
            drafter.truncate = lambda state, lengths: None

    Engine.__init__ = without_truncate


@mutant("commit left half done by an interrupt", INTERRUPT)
def commit_half_done() -> None:
    from eaglelab.decoding.transaction import Transaction

    Transaction.__exit__ = lambda self, *error: self._drop_provisional()


@mutant("features of the leading rows, not of the accepted ones", FRESH + "[noisy-static]")
def features_of_leading_rows() -> None:
    from eaglelab.decoding import transaction

    transaction._gather_rows = lambda values_BRF, rows_BA: values_BRF[:, : rows_BA.shape[1]]


@mutant("target rows mixed up when a sequence leaves", BATCHES + "[chain-greedy]")
def rows_mixed_up() -> None:
    from eaglelab.target import kv

    kv.moves = lambda order: []


@mutant("draft rows mixed up when a sequence leaves", COMMITTED + "[static]")
def draft_rows_mixed_up() -> None:
    from eaglelab.drafters import runtime

    runtime.moves = lambda order: []


@mutant("draft rows to add mixed up when a sequence leaves", COMMITTED + "[dynamic]")
def pending_mixed_up() -> None:
    from eaglelab.decoding.state import DraftRows

    select = DraftRows.select

    def leading(self, order):
        chosen = select(self, order)
        return dataclasses.replace(chosen, features_BNF=self.features_BNF[: len(order)])

    DraftRows.select = leading
