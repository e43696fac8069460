"""Which rows a rollout has to compute, planned on the host before the batch goes to its device.

Prompts are rows too, but most of them never enter a loss: of those only keys and values are needed, which come from
the target. A root is needed when one of its steps lands on a supervised row.

Letters: B sequences, R rows, U needed rows of a sequence, M rows in the loss, S rollout steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eaglelab.data.rows import Rows, first_seen

WORTH = 0.95
"""Share of the rows from which on nothing is left out: gathering costs a little, too."""


@dataclasses.dataclass
class NeededRows:
    """The roots of a rollout and where its steps enter the loss.

    Attributes:
        rows: the needed rows as a plan of their own. A sequence with fewer than U has others in between.
        slot_BU: int64, row slot of each, ascending; None: all rows, U = R.
        loss: for each step int64 [M_s], the roots ``b * U + u`` whose step enters the loss.
        landed: for each step int64 [M_s], the place in ``landing_M`` of the row that each root of ``loss`` lands on;
            anything where step 0 does not enter the loss there.
        landing_M: int64, the rows ``b * R + r`` of the whole plan that step 0 enters the loss at.
        root_MS: int64, the root ``b * U + u`` whose step ``s`` lands there; anything where none does.
        lands_MS: bool, whether one does.
        spans: over all sequences, the first row that each needed row sees and the last one; known to the host.
    """

    rows: Rows
    slot_BU: Tensor | None
    loss: tuple[Tensor, ...]
    landed: tuple[Tensor, ...]
    landing_M: Tensor
    root_MS: Tensor
    lands_MS: Tensor
    spans: tuple[list[int], list[int]]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> NeededRows:
        """A copy on ``device``."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {
            name: part.to(device, non_blocking=non_blocking) if isinstance(part, Tensor | Rows) else part
            for name, part in parts.items()
        }
        for name in ("loss", "landed"):
            moved[name] = tuple(x_M.to(device, non_blocking=non_blocking) for x_M in parts[name])
        return NeededRows(**moved)


def pick(x_BR: Tensor, slot_BU: Tensor | None) -> Tensor:
    """Rows ``slot_BU`` of each sequence, [B, R, ...] -> [B, U, ...]; None: all of them."""
    if slot_BU is None:
        return x_BR
    B, R = x_BR.shape[:2]
    begin_B1 = torch.arange(B, device=slot_BU.device)[:, None] * R
    return x_BR.flatten(0, 1).index_select(0, (begin_B1 + slot_BU).flatten()).unflatten(0, slot_BU.shape)


def needed_rows(rows: Rows, loss: Sequence[Tensor], *, all_rows: bool = False) -> NeededRows:
    """Plan a rollout.

    Args:
        rows: the whole plan.
        loss: for each step the roots ``b * R + r`` whose step enters the loss.
        all_rows: leave none out.
    """
    B, R = rows.legal_BR.shape
    needed_N = torch.zeros(B * R, dtype=torch.bool, device=rows.legal_BR.device)
    for root_M in loss:
        needed_N[root_M] = True
    needed_BR = needed_N.view(B, R)
    U = max(int(needed_BR.sum(1).max()), 1) if B * R else 0
    if all_rows or U >= WORTH * R:
        slot_BU, U, own = None, R, dataclasses.replace(rows, needed=None)
        place_N = torch.arange(B * R, device=needed_N.device)
    else:
        slot_BU = (~needed_BR).to(torch.int8).argsort(dim=1, stable=True)[:, :U].sort(dim=1).values
        address_N = (torch.arange(B, device=needed_N.device)[:, None] * R + slot_BU).flatten()
        place_N = torch.zeros_like(needed_N, dtype=torch.int64)
        place_N[address_N] = torch.arange(B * U, device=needed_N.device)
        own = _some_of(rows, slot_BU, place_N[loss[0]])
    landing_M = loss[0]
    root_MS = landing_M[:, None] - torch.arange(len(loss), device=landing_M.device)
    in_loss_SN = needed_N.new_zeros(len(loss), B * R)
    for step, root_M in enumerate(loss):
        in_loss_SN[step, root_M] = True
    step_S = torch.arange(len(loss), device=landing_M.device)
    lands_MS = (root_MS >= 0) & in_loss_SN[step_S, root_MS.clamp(min=0)]
    root_MS = place_N[root_MS.clamp(min=0)]
    start_BU = pick(first_seen(rows), slot_BU) * (0 if rows.causal else 1)
    last_BU = torch.arange(R, device=start_BU.device)[None] if slot_BU is None else slot_BU
    spans = (start_BU.amin(0).tolist(), last_BU.amax(0).tolist())
    rank_N = torch.zeros(B * R, dtype=torch.int64, device=landing_M.device)
    rank_N[landing_M] = torch.arange(len(landing_M), device=landing_M.device)
    landed = tuple(rank_N[(root_M + step).clamp(max=B * R - 1)] for step, root_M in enumerate(loss))
    in_own = tuple(place_N[root_M] for root_M in loss)
    return NeededRows(own, slot_BU, in_own, landed, landing_M, root_MS, lands_MS, spans)


def _some_of(rows: Rows, slot_BU: Tensor, supervised_M: Tensor) -> Rows:
    parts: dict[str, Any] = {
        field.name: pick(value, slot_BU)
        for field in dataclasses.fields(rows)
        if isinstance(value := getattr(rows, field.name), Tensor) and value.dim() == 2
    }
    return dataclasses.replace(rows, **parts, supervised_M=supervised_M, needed=None)
