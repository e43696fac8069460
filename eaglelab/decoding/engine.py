"""The speculative engine: draft a tree, verify it, publish what the target confirms.

Letters: B batch, N prompt rows, R flat rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from eaglelab.decoding import verify
from eaglelab.decoding.protocol import Drafter, DraftSeed, TreePolicy, last_rows
from eaglelab.decoding.records import GenerationResult, RoundRecord, Stopwatch
from eaglelab.decoding.state import DecodeState, DraftRows, Request, stack_features
from eaglelab.decoding.transaction import Transaction
from eaglelab.decoding.tree import FlatTree, root_only

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget


class Engine:
    """Greedy decoding of a target, with a drafter or, through the same code, without.

    Args:
        target: decides every token.
        drafter: proposes tokens; None decodes plainly.
        tree: which candidates to draft; given exactly when a drafter is.
        capacity: target rows per generation; None makes room for each request.

    Raises:
        ValueError: a drafter without a tree or the other way round.
    """

    def __init__(
        self,
        target: FrozenTarget,
        drafter: Drafter | None = None,
        tree: TreePolicy | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        if (drafter is None) != (tree is None):
            raise ValueError(
                "a drafter needs a tree and a tree needs a drafter: pass both, or neither to decode plainly"
            )
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.capacity = capacity
        self.taps = () if drafter is None else tuple(drafter.taps)

    def round(self, state: DecodeState) -> RoundRecord:
        """One speculative round; see `Transaction` for what an exception leaves behind."""
        watch = Stopwatch(self.target.device)
        with torch.inference_mode(), Transaction(state, self.drafter) as transaction:
            flat = self._draft(state)
            watch.mark()
            verified = self.target.forward_rows(
                flat.tokens_BR,
                state.length_B1 + flat.topology.depth_BR,
                state.cache,
                ancestor_BNN=flat.mask_BRR,
                taps=self.taps if state.draft is not None else (),
            )
            decision = verify.greedy(verified.logits_BNV, flat)
            host = decision.to_host()  # the round's one host sync
            watch.mark()
            (publication,) = transaction.commit(decision, host, verified)
        watch.mark()
        return RoundRecord(
            drafted=flat.nodes,
            verified=flat.rows,
            accepted=publication.accepted,
            reached=len(host.published[0]) - 1,
            published=len(publication.tokens),
            stop_reason=publication.stop_reason,
            watch=watch,
        )

    def _draft(self, state: DecodeState) -> FlatTree:
        """This round's tree, or the bare root when there is no room or no need for one."""
        if self.drafter is None or self.tree is None or not self._may_draft(state):
            return root_only(state.frontier_B1)
        self._reseed(state)
        if all(request.max_tokens - len(request.tokens) == 1 for request in state.requests):
            return root_only(state.frontier_B1)
        assert state.seed_B1d is not None
        seed = DraftSeed(state.seed_B1d, state.length_B1 - 1)
        return self.tree.draft(self.drafter, state.draft, seed).flatten(state.frontier_B1)

    def _may_draft(self, state: DecodeState) -> bool:
        """False from the first round on whose deepest node would pass the last position or slot."""
        assert self.drafter is not None and self.tree is not None
        if state.draft is None:
            return False
        positions = min(self.target.max_positions, self.drafter.max_positions)
        fits = (
            state.length + self.tree.max_depth < positions and state.length + 1 + self.tree.max_nodes <= state.capacity
        )
        if not fits:
            state.draft = state.pending = state.seed_B1d = None
        return fits

    def _reseed(self, state: DecodeState) -> None:
        """Give the drafter the target-derived rows that it has not seen."""
        rows = state.pending
        if rows is None or self.drafter is None:
            return
        hidden_BNd = self.drafter.extend(state.draft, rows.features_BNF, rows.tokens_BN, rows.position_BN, rows.counts)
        state.seed_B1d, state.pending = last_rows(hidden_BNd, rows.counts), None

    @torch.inference_mode()
    def start(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int] | set[int] | None = None,
    ) -> DecodeState:
        """Prefill target and drafter; publishes the first token.

        Args:
            prompt_ids: token ids, at least one.
            max_new_tokens: exact upper limit on new tokens.
            stop_ids: tokens that end the generation; None takes the target's end tokens.

        Raises:
            ValueError: empty prompt, no room for a new token, or max_new_tokens < 1.
        """
        watch = Stopwatch(self.target.device)
        request = self._request(prompt_ids, max_new_tokens, stop_ids)
        N, device = len(prompt_ids), self.target.device
        tree_nodes = 0 if self.tree is None else self.tree.max_nodes
        capacity = self.capacity or request.max_tokens + tree_nodes
        tokens_BN = torch.tensor([request.tokens], device=device)
        position_BN = torch.arange(N, device=device)[None]
        cache = self.target.new_cache(1, capacity)
        output = self.target.forward_rows(tokens_BN, position_BN, cache, taps=self.taps, logits="last")
        root_B1 = output.logits_BNV.argmax(dim=-1)
        cache.commit(None, [N])
        state = DecodeState(
            requests=[request],
            cache=cache,
            capacity=capacity,
            frontier_B1=root_B1,
            length_B1=torch.full((1, 1), N, device=device),
        )
        request.admit_first(int(root_B1))
        if self.drafter is not None and self.tree is not None and request.stop_reason is None:
            state.draft = self.drafter.new_state(1, capacity + self.tree.max_step_rows)
            state.pending = DraftRows(
                stack_features(output.features, self.taps),
                torch.cat([tokens_BN[:, 1:], root_B1], dim=1),
                position_BN,
                [N],
            )
            if self._may_draft(state):
                self._reseed(state)
        watch.mark()
        state.prefill_s = watch.between(0, 1)
        return state

    def _request(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: frozenset[int] | set[int] | None,
    ) -> Request:
        N = len(prompt_ids)
        if N == 0:
            raise ValueError("empty prompt: decoding needs at least one token to start from")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: ask for at least one token")
        room = self.target.max_positions if self.capacity is None else self.capacity
        room = min(room, self.target.max_positions)
        if room <= N:
            raise ValueError(
                f"the prompt has {N} tokens and the context has room for {room}: shorten the "
                "prompt, or raise the engine's capacity if that is what limits it "
                f"(the target has {self.target.max_positions} positions)"
            )
        wanted = N + max_new_tokens
        return Request(
            tokens=list(prompt_ids),
            prompt_length=N,
            max_tokens=min(wanted, room),
            limit_reason="length" if wanted <= room else "context",
            stop_ids=frozenset(self.target.eos_token_ids if stop_ids is None else stop_ids),
        )

    def rounds(self, state: DecodeState) -> Iterator[RoundRecord]:
        """Run rounds until every request has stopped."""
        while any(request.stop_reason is None for request in state.requests):
            yield self.round(state)

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int] | set[int] | None = None,
    ) -> GenerationResult:
        """Decode one prompt to its end. Arguments and errors are those of `start`."""
        state = self.start(prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        watch = Stopwatch(self.target.device)
        records = list(self.rounds(state))
        watch.mark()
        (request,) = state.requests
        assert request.stop_reason is not None
        return GenerationResult(
            tokens=request.new_tokens,
            prompt_length=request.prompt_length,
            rounds=records,
            stop_reason=request.stop_reason,
            prefill_s=state.prefill_s,
            decode_s=watch.between(0, 1),
        )
