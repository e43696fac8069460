"""What a generation needs before its first round: checked requests and enough memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil
import torch

from eaglelab.decoding.sampling import Sampling
from eaglelab.decoding.state import Request

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget

StopIds = frozenset[int] | set[int] | None
GIB = 2**30
CALL_ROWS = {"cpu": 16}
"""What one more forward pass costs, in rows, by device. On a CPU rows cost; elsewhere a pass does."""
ELSEWHERE = 512


def requests_for(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: StopIds,
    sampling: Sampling | Sequence[Sampling] | None,
    capacity: int | None,
) -> list[Request]:
    """One request per prompt. A single `sampling` serves all of them, the seed of prompt i being its seed + i.

    Raises:
        ValueError: no prompt, an empty one, one that leaves no room for a new token, max_new_tokens < 1, or another
            number of samplings than of prompts.
    """
    if len(prompts) and isinstance(prompts[0], int):
        raise ValueError("prompts must be a list of prompts, each a list of token ids; for one prompt use generate_one")
    if not prompts:
        raise ValueError("no prompts: decoding needs at least one")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: ask for at least one token")
    if sampling is None or isinstance(sampling, Sampling):
        base = sampling or Sampling()
        settings = [base.with_seed(base.seed + number) for number in range(len(prompts))]
    else:
        settings = list(sampling)
        if len(settings) != len(prompts):
            raise ValueError(f"{len(settings)} samplings for {len(prompts)} prompts: give one each, or one for all")
    stops = frozenset(target.eos_token_ids if stop_ids is None else stop_ids)
    room = min(target.max_positions, capacity or target.max_positions)
    requests = []
    for number, (prompt, one) in enumerate(zip(prompts, settings, strict=True)):
        N = len(prompt)
        where = f"prompt {number}: " if len(prompts) > 1 else ""
        if N == 0:
            raise ValueError(f"{where}empty prompt: decoding needs at least one token to start from")
        if room <= N:
            raise ValueError(
                f"{where}the prompt has {N} tokens and the context has room for {room}: shorten the "
                "prompt, or raise the engine's capacity if that is what limits it "
                f"(the target has {target.max_positions} positions)"
            )
        wanted = N + max_new_tokens
        requests.append(
            Request(
                tokens=list(prompt),
                prompt_length=N,
                max_tokens=min(wanted, room),
                limit_reason="length" if wanted <= room else "context",
                stop_ids=stops,
                sampling=one,
                number=number,
            )
        )
    return requests


def similar(requests: Sequence[Request], device: torch.device) -> list[list[Request]]:
    """Split prompts, in their order, into groups to forward together: padding costs no more than a pass would."""
    worth = CALL_ROWS.get(device.type, ELSEWHERE)
    groups: list[list[Request]] = []
    padding = 0
    for request in requests:
        lengths = [one.prompt_length for one in (*groups[-1], request)] if groups else []
        padded = len(lengths) * max(lengths, default=0) - sum(lengths)
        if groups and padded - padding <= worth:
            groups[-1].append(request)
            padding = padded
        else:
            groups.append([request])
            padding = 0
    return groups


def check_memory(target: FrozenTarget, batch: int, capacity: int, limit: int | None) -> None:
    """Refuse key/value slots that the memory cannot hold, before any of them is asked for.

    Args:
        limit: bytes; None: what the device has free now.

    Raises:
        ValueError: they need more; says how much, and what would fit.
    """
    row_bytes = target.kv_row_bytes
    if row_bytes is None:
        return
    need = batch * (capacity + 1) * row_bytes
    if limit is None:
        limit = _free(target.device)
    if need > limit:
        fitting = limit // ((capacity + 1) * row_bytes)
        raise ValueError(
            f"the target's key/value slots for {batch} sequences of {capacity} rows need {need / GIB:.2f} GiB, "
            f"{limit / GIB:.2f} GiB are allowed: "
            + (f"use a batch of at most {fitting}" if fitting else "use fewer new tokens or shorter prompts")
        )


def _free(device: torch.device) -> int:
    """Bytes; of a GPU also those that torch holds and nobody uses, such as the slots of a generation before."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
