"""The speculative engine: draft trees, verify them, publish what the target confirms.

Letters: B batch, N prompt rows, R flat rows, L levels of a tree with the root's, K children, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eaglelab.decoding import sampling as law
from eaglelab.decoding.admission import StopIds, check_memory, requests_for, similar
from eaglelab.decoding.nodes import NodeRecord, node_records
from eaglelab.decoding.prefill import prefill
from eaglelab.decoding.protocol import Drafter, DraftSeed, DraftState, TreePolicy, last_rows
from eaglelab.decoding.records import GenerationResult, RoundRecord
from eaglelab.decoding.residual import accept_sampled
from eaglelab.decoding.sampling import Sampling
from eaglelab.decoding.state import DecodeState, Request
from eaglelab.decoding.transaction import Transaction
from eaglelab.decoding.tree import FlatTree, Tree, root_only
from eaglelab.decoding.verify import Decision, HostDecision, follow
from eaglelab.kernels.recording import Recordings
from eaglelab.ops import on_device
from eaglelab.stopwatch import Stopwatch
from eaglelab.target.experts import ExpertWatch

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget
    from eaglelab.target.kv import KVSlots

COMPILED_SLOTS = 256
"""Compiled rounds have a multiple of this as their capacity."""
Samplings = Sampling | Sequence[Sampling] | None


class Engine:
    """Decodes with a drafter or, through the same code, without; one prompt or a changing batch of them.

    Whatever the drafter proposes, greedy output is that of plain greedy decoding and sampled output has the law of
    plain sampling (with a deterministic tree it is the same text, see `eaglelab.decoding.sampling`).

    Args:
        target: decides every token.
        drafter: proposes tokens; None decodes plainly.
        tree: which candidates to draft; given exactly when a drafter is.
        capacity: target rows per sequence; None makes room for each request.
        max_kv_bytes: most memory for the target's keys and values; None: what the device has free.
        record_nodes: keep every round's tree, with its confidences, acceptances and expert unions, in its record.
        compile: run verification and draft steps through `torch.compile`. Their shapes are fixed then: attention reads
            all slots up to the capacity, and a pass is compiled at its first use, which takes a minute or more. Rounds
            of another size (a batch that is not full, a tree cut by its floor) run as ever.
        graphs: record drafting and verification as CUDA graphs at their first use and replay them, with shapes as for
            ``compile``; or the recordings to use. Trees that are drawn at random or cut by a floor are drafted as ever.

    Raises:
        ValueError: a drafter without a tree or the other way round; ``graphs`` without CUDA, or beside ``compile``.
    """

    def __init__(
        self,
        target: FrozenTarget,
        drafter: Drafter | None = None,
        tree: TreePolicy | None = None,
        *,
        capacity: int | None = None,
        max_kv_bytes: int | None = None,
        record_nodes: bool = False,
        compile: bool = False,
        graphs: bool | Recordings = False,
    ) -> None:
        if (drafter is None) != (tree is None):
            raise ValueError(
                "a drafter needs a tree and a tree needs a drafter: pass both, or neither to decode plainly"
            )
        if graphs is not False and compile:
            raise ValueError("compile=true and graphs=true both fix how a round runs; choose one")
        if graphs is True and target.device.type != "cuda":
            raise ValueError(f"graphs=true records CUDA graphs, and the target is on {target.device}; use device=cuda")
        self.target = target
        self.drafter = drafter
        self.tree = tree
        self.capacity = capacity
        self.max_kv_bytes = max_kv_bytes
        self.record_nodes = record_nodes
        self.compile = compile
        self.recordings = graphs if isinstance(graphs, Recordings) else Recordings() if graphs else None
        self._spare: tuple[KVSlots, DraftState | None] | None = None
        self.taps = () if drafter is None else tuple(drafter.taps)
        self._experts = ExpertWatch(target) if record_nodes and ExpertWatch.supported(target) else None
        self._rounds = 0

    # ---- a round --------------------------------------------------------------------------------------------

    def round(self, state: DecodeState) -> list[RoundRecord]:
        """One speculative round of every sequence; see `Transaction` for what an exception leaves behind."""
        watch = Stopwatch(self.target.device)
        with torch.inference_mode(), Transaction(state, self.drafter) as transaction:
            drafting = self._drafting(state)
            tree, generators = self._draft(state, drafting)
            watch.mark()
            drafted = root_only(state.frontier_B1) if tree is None else tree.flatten(state.frontier_B1)
            flat = drafted.only_for(drafting)
            position_BR = state.length_B1 + flat.topology.depth_BR
            ancestor_BRR = flat.mask_BRR
            with self._experts or nullcontext():
                verified = self.target.forward_rows(
                    flat.tokens_BR,
                    position_BR,
                    state.cache,
                    ancestor_BNN=ancestor_BRR,
                    taps=self.taps if any(request.drafting for request in state.requests) else (),
                    count_B=None if flat is drafted else [flat.rows if one else 1 for one in drafting],
                    planned=watch.mark,
                    compiled=self.compile and self._is_full(state, flat, drafting),
                    **self._replayed(state, flat, drafting),
                )
            decision = self._decide(state, verified.logits_BNV, flat, drafted, drafting, generators)
            host = decision.to_host()  # the round's one host sync
            watch.mark()
            nodes = self._nodes(drafted, drafting, host)
            publications = transaction.commit(decision, host, verified)
        watch.mark()
        row_bytes = getattr(state.draft, "row_bytes", 0)
        self._rounds += 1
        return [
            RoundRecord(
                request=request.number,
                round=self._rounds,
                batch=state.batch,
                expanded=flat.expanded if drafts else 0,
                drafted=flat.nodes if drafts else 0,
                verified=flat.rows if drafts else 1,
                accepted=publication.accepted,
                reached=len(published) - 1,
                published=len(publication.tokens),
                published_tokens=publication.tokens,
                stop_reason=publication.stop_reason,
                target_kv_bytes=(flat.rows if drafts else 1) * state.cache.row_bytes,
                draft_kv_bytes=self.tree.max_step_rows * row_bytes if drafts and self.tree else 0,
                watch=watch,
                nodes=node,
            )
            for request, publication, published, drafts, node in zip(
                state.requests, publications, host.published, drafting, nodes, strict=True
            )
        ]

    @property
    def _fixes_shapes(self) -> bool:
        return self.compile or self.recordings is not None

    def _is_full(self, state: DecodeState, flat: FlatTree, drafting: list[bool]) -> bool:
        """Whether the round has the one shape that is compiled or recorded: a full batch, and a full tree or none."""
        rows = 1 if self.tree is None else 1 + self.tree.max_nodes
        return state.batch == state.cache.room and flat.rows == rows and len(set(drafting)) == 1

    def _replayed(self, state: DecodeState, flat: FlatTree, drafting: list[bool]) -> dict[str, Any]:
        """How the verification is recorded, where it can be; the watch on a target's experts runs in Python."""
        if self.recordings is None or self._experts is not None or not self._is_full(state, flat, drafting):
            return {}
        return {"recordings": self.recordings, "length_B": state.length_B1[:, 0]}

    def _nodes(self, flat: FlatTree, drafting: list[bool], host: HostDecision) -> Sequence[NodeRecord | None]:
        if not self.record_nodes:
            return [None] * len(drafting)
        real_BR = torch.ones(len(drafting), flat.rows, dtype=torch.bool)
        real_BR[[not one for one in drafting], 1:] = False
        experts = None if self._experts is None else self._experts.union(real_BR)
        return node_records(flat if self.recordings is None else flat.copied(), drafting, host.rows, experts)

    @torch.inference_mode()
    def _drafting(self, state: DecodeState) -> list[bool]:
        """Which sequences get a tree in this round. One whose deepest node could pass the last position or slot
        drafts no more; one that may publish a single token has no use for a tree."""
        if self.drafter is None or self.tree is None:
            return [False] * state.batch
        positions = min(self.target.max_positions, self.drafter.max_positions)
        for request in state.requests:
            length = len(request.tokens) - 1
            fits = length + self.tree.max_depth < positions and length + 1 + self.tree.max_nodes <= state.capacity
            request.drafting = request.drafting and fits
        self._reseed(state)
        return [request.drafting and request.max_tokens - len(request.tokens) > 1 for request in state.requests]

    def _reseed(self, state: DecodeState) -> None:
        """Give the drafter the target-derived rows that it has not seen."""
        rows = state.pending
        if rows is None or self.drafter is None:
            return
        counts = [n if request.drafting else 0 for n, request in zip(rows.counts, state.requests, strict=True)]
        if any(counts):
            self.drafter.truncate(state.draft, rows.starts)  # an interrupt may have struck behind extend
            last = min(self.target.max_positions, self.drafter.max_positions) - 1  # padding may lie behind it
            position_BN = rows.position_BN.clamp(max=last)
            hidden_BNd = self.drafter.extend(state.draft, rows.features_BNF, rows.tokens_BN, position_BN, counts)
            state.seed_B1d = last_rows(hidden_BNd, counts, state.seed_B1d)
        state.pending = None

    def _draft(self, state: DecodeState, drafting: list[bool]) -> tuple[Tree | None, Sequence[torch.Generator]]:
        """This round's trees (None when nobody drafts) and, where nodes are sampled, the streams they came from."""
        if self.drafter is None or self.tree is None or not any(drafting):
            return None, ()
        assert state.seed_B1d is not None
        position_B1 = state.length_B1 - 1
        if not all(drafting):
            drafting_B1 = on_device(drafting, position_B1.device)[:, None]
            position_B1 = position_B1 * drafting_B1
        seed = DraftSeed(state.seed_B1d, position_B1)
        generators: list[torch.Generator] = []
        if self.tree.samples:
            device = self.target.device
            generators = [request.stream.round(request.place, device) for request in state.requests]
            settings = [request.sampling for request in state.requests]
            seed = DraftSeed(
                state.seed_B1d,
                position_B1,
                noise=lambda shape: law.noise(generators, shape),
                warp=lambda log_p_BWV: law.warp_drafts(log_p_BWV, settings),
            )
        full = all(drafting) and state.batch == state.cache.room
        quiet = not (self.tree.samples or self.tree.asks_host)
        if self.recordings is not None and full and quiet and hasattr(state.draft, "fixed_at"):
            return self._recorded_tree(self.recordings, state.draft, seed, state.length_B1), generators
        return self.tree.draft(self.drafter, state.draft, seed), generators

    def _recorded_tree(self, recordings: Recordings, slots: DraftState, seed: DraftSeed, length_B1: Tensor) -> Tree:
        """A tree whose tensors the next round's are written over."""
        policy, drafter = self.tree, self.drafter
        assert policy is not None and drafter is not None

        def tree(hidden_B1d: Tensor, position_B1: Tensor, length_B1: Tensor) -> Tree:
            with slots.fixed_at(length_B1):
                return policy.draft(drafter, slots, DraftSeed(hidden_B1d, position_B1))

        found: Tree = recordings.call((id(slots), id(policy)), tree, seed.hidden_B1d, seed.position_B1, length_B1)
        return found

    def _decide(
        self,
        state: DecodeState,
        logits_BRV: Tensor,
        flat: FlatTree,
        drafted: FlatTree,
        drafting: list[bool],
        generators: Sequence[torch.Generator],
    ) -> Decision:
        """The target's decision on every tree; `flat` is `drafted` without the nodes that nobody may take."""
        settings = [request.sampling for request in state.requests]
        L = flat.topology.path_BRL.shape[-1]
        streams, places = [r.stream for r in state.requests], [r.place for r in state.requests]
        uniform_BL = law.numbers(settings, streams, places, L, logits_BRV.device)
        scores_BRV = law.processed(logits_BRV, flat, settings, [request.tokens[:-1] for request in state.requests])
        decision = follow(law.choose(scores_BRV, flat, settings, uniform_BL), flat)
        if uniform_BL is None or drafted.proposals is None:
            return decision
        p_BRV = law.distribution(scores_BRV, settings)
        K = drafted.proposals.children_EK.shape[1]
        sampled = accept_sampled(p_BRV, drafted, law.noise(generators, (L, K)), uniform_BL)
        if all(drafting):
            return sampled
        return sampled.where(on_device(drafting, p_BRV.device)[:, None], decision)

    # ---- requests come and go -------------------------------------------------------------------------------

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: StopIds = None,
        sampling: Samplings = None,
        room: int | None = None,
    ) -> DecodeState:
        """Prefill target and drafter for a batch of prompts; publishes each one's first token.

        Args:
            prompts: token ids, at least one per prompt.
            max_new_tokens: exact upper limit on new tokens per prompt.
            stop_ids: tokens that end a generation; None takes the target's end tokens.
            sampling: greedy when None; one for all (prompt i then has its seed + i) or one per prompt.
            room: most sequences that will be decoded at once; None: these.

        Raises:
            ValueError: an empty prompt, no room for a new token, max_new_tokens < 1, or too little memory.
        """
        requests = requests_for(
            self.target,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            sampling=sampling,
            capacity=self.capacity,
        )
        room = max(room or 0, len(requests))
        capacity = self._capacity(requests)
        self._require_memory(room, capacity)
        return self._joined(None, requests, capacity, room)

    def release(self, state: DecodeState) -> None:
        """Take back a state that is decoded no further: the next one gets its slots, and what was recorded of them."""
        if self.recordings is None or not state.cache.whole:
            return
        self._drop_spare()
        self._spare = state.cache, state.draft

    def _capacity(self, requests: Sequence[Request]) -> int:
        nodes = 0 if self.tree is None else self.tree.max_nodes
        needed = max(request.max_tokens for request in requests) + nodes
        if self._fixes_shapes:  # one shape for prompts of many lengths
            needed = -(-needed // COMPILED_SLOTS) * COMPILED_SLOTS
        return self.capacity or needed

    def _joined(self, state: DecodeState | None, requests: list[Request], capacity: int, room: int) -> DecodeState:
        """The state with these requests behind those it has, prefilled in groups of similar length."""
        for group in similar(requests, self.target.device):
            part = self._prefilled(group, capacity, room if state is None else None)
            if state is None:
                state = part
            else:
                state.join(part, self.drafter)
        assert state is not None
        return state

    def _prefilled(self, requests: list[Request], capacity: int, room: int | None) -> DecodeState:
        began = time.perf_counter()
        whole = self._fixes_shapes and room is not None
        spare = self._take_spare(capacity, room) if whole else None
        if whole and spare is None and self.recordings is not None:
            self.recordings.clear()  # of slots that nobody will use again
        try:
            state = prefill(self.target, self.drafter, self.tree, requests, capacity, room, whole, spare)
        except BaseException:
            self._spare = self._spare or spare
            raise
        if whole and self.compile and state.draft is not None and hasattr(state.draft, "compiled"):
            state.draft.compiled = True
        self._drafting(state)
        for request in requests:
            request.prefill_s = (time.perf_counter() - began) / len(requests)
        return state

    def _take_spare(self, capacity: int, room: int | None) -> tuple[KVSlots, DraftState | None] | None:
        """The slots of a finished batch where they fit: recordings are of their buffers."""
        if not self._spare_fits(capacity, room):
            return None
        spare, self._spare = self._spare, None
        return spare

    def _spare_fits(self, capacity: int, room: int | None) -> bool:
        """Somewhat larger ones do: a pass reads all of them, but recording anew takes as long as many passes."""
        if self._spare is None:
            return False
        cache, _ = self._spare
        return cache.room == room and capacity <= cache.capacity <= 2 * capacity

    def _drop_spare(self) -> None:
        """The slots of a finished batch, and the recordings that would keep their memory."""
        if self._spare is not None and self.recordings is not None:
            self._spare = None
            self.recordings.clear()

    def _require_memory(self, room: int, capacity: int) -> None:
        """Slots of a finished batch are used again, or make room for those that are.

        Raises:
            ValueError: see `check_memory`.
        """
        if not self._spare_fits(capacity, room):
            self._drop_spare()
            check_memory(self.target, room, capacity, self.max_kv_bytes)

    def rounds(self, state: DecodeState) -> Iterator[list[RoundRecord]]:
        """Run rounds until every request has stopped; stopped ones leave the batch in between."""
        while any(state.running):
            state.retire(self.drafter)
            yield self.round(state)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: StopIds = None,
        sampling: Samplings = None,
        batch: int = 8,
        on_round: Callable[[list[RoundRecord]], None] | None = None,
        on_finish: Callable[[int, GenerationResult], None] | None = None,
    ) -> list[GenerationResult]:
        """Decode prompts, up to `batch` at a time; a waiting prompt takes the place of a finished one.

        Args:
            on_round: called with the records of every round.
            on_finish: called with the number and the result of every finished prompt, in the order of finishing.

        Other arguments and errors are those of `start`; no prompt is decoded before all of them are checked.

        Returns:
            One result per prompt, in the order of the prompts.
        """
        if batch < 1:
            raise ValueError(f"batch={batch}: decode at least one prompt at a time")
        waiting = requests_for(
            self.target,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            sampling=sampling,
            capacity=self.capacity,
        )
        capacity, room = self._capacity(waiting), min(batch, len(waiting))
        self._require_memory(room, capacity)
        rounds: list[list[RoundRecord]] = [[] for _ in waiting]
        seconds = [0.0] * len(waiting)
        results: list[GenerationResult | None] = [None] * len(waiting)
        state: DecodeState | None = None

        def finish(request: Request) -> None:
            assert request.stop_reason is not None
            result = GenerationResult(
                tokens=request.new_tokens,
                prompt_length=request.prompt_length,
                rounds=rounds[request.number],
                stop_reason=request.stop_reason,
                prefill_s=request.prefill_s,
                decode_s=seconds[request.number],
            )
            results[request.number] = result
            if on_finish is not None:
                on_finish(request.number, result)

        try:
            while waiting or state is not None:
                if state is None:
                    state, waiting = self._joined(None, waiting[:room], capacity, room), waiting[room:]
                elif waiting and (free := room - state.batch):
                    self._joined(state, waiting[:free], capacity, room)
                    waiting = waiting[free:]
                for request in state.retire(self.drafter):
                    finish(request)
                if not any(state.running):
                    self.release(state)
                    state = None
                if state is None or (waiting and state.batch < room):
                    continue
                began = time.perf_counter()
                records = self.round(state)
                share = (time.perf_counter() - began) / len(records)
                for record in records:
                    rounds[record.request].append(record)
                    seconds[record.request] += share
                if on_round is not None:
                    on_round(records)
        finally:
            if state is not None:  # interrupted
                self.release(state)
        return [result for result in results if result is not None]

    def generate_one(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: StopIds = None,
        sampling: Sampling | None = None,
    ) -> GenerationResult:
        """Decode one prompt. Arguments and errors are those of `start`."""
        (result,) = self.generate([prompt_ids], max_new_tokens=max_new_tokens, stop_ids=stop_ids, sampling=sampling)
        return result
