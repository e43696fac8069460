"""The committed state that a batch of prompts starts from.

Letters: B batch, N tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eaglelab.decoding import sampling as law
from eaglelab.decoding.protocol import Drafter, DraftState, TreePolicy
from eaglelab.decoding.state import DecodeState, DraftRows, Request, stack_features
from eaglelab.decoding.tree import root_only
from eaglelab.decoding.verify import check_chosen
from eaglelab.ops import on_device

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget
    from eaglelab.target.kv import KVSlots


@torch.inference_mode()
def prefill(
    target: FrozenTarget,
    drafter: Drafter | None,
    tree: TreePolicy | None,
    requests: list[Request],
    capacity: int,
    room: int | None,
    whole: bool = False,
    spare: tuple[KVSlots, DraftState | None] | None = None,
) -> DecodeState:
    """Forward the prompts, publish each one's first token and leave their draft rows pending.

    Args:
        capacity: target rows per sequence that the state may ever hold.
        room: sequences that the state has slots for; None: slots for just these prompts, to be joined to a state.
        whole: as in `KVSlots`, for rounds that are compiled or recorded.
        spare: slots of that capacity and room to use again.
    """
    B, device = len(requests), target.device
    counts = [request.prompt_length for request in requests]
    N = max(counts)
    tokens_BN = on_device([request.tokens + [0] * (N - len(request.tokens)) for request in requests], device)
    position_BN = torch.arange(N, device=device).expand(B, N)
    last_B1 = on_device(counts, device)[:, None] - 1
    settings_of_slots = {"whole": True} if whole else {}
    if spare is None:
        cache = target.new_cache(B, N if room is None else capacity, room=room, **settings_of_slots)
    else:
        cache = spare[0]
        cache.reset(B)
    taps = () if drafter is None else tuple(drafter.taps)
    ragged = None if min(counts) == N else counts
    output = target.forward_rows(tokens_BN, position_BN, cache, taps=taps, count_B=ragged, logits="last")
    flat = root_only(tokens_BN.gather(1, last_B1))
    settings = [request.sampling for request in requests]
    uniform_B1 = law.numbers(settings, [request.stream for request in requests], [0] * B, 1, device)
    scores_B1V = law.processed(output.logits_BNV, flat, settings, [request.tokens[:-1] for request in requests])
    root_B1 = law.choose(scores_B1V, flat, settings, uniform_B1)
    first = root_B1.flatten().tolist()
    check_chosen(first)
    cache.commit(None, counts)
    state = DecodeState(requests, cache, capacity, frontier_B1=root_B1, length_B1=last_B1 + 1)
    for request, token in zip(requests, first, strict=True):
        request.publish(request.admit([token]))
    if drafter is not None and tree is not None:
        rows = N if room is None else capacity + tree.max_step_rows
        if spare is not None and spare[1] is not None:
            state.draft = spare[1]
            state.draft.reset(B)
        else:
            state.draft = drafter.new_state(B, rows, room)
        advanced_BN = tokens_BN.roll(-1, dims=1).scatter(1, last_B1, root_B1)
        features_BNF = stack_features(output.features, taps)
        state.pending = DraftRows(features_BNF, advanced_BN, position_BN, counts, [0] * B)
    return state
