"""Rows: which feature, token and target addresses a batch offers to a drafter.

A row is a source token index ``t`` whose feature ``f_t`` and advanced token ``x_{t+1}`` exist in one
segment. It predicts ``f_{t+1}``; its logits are for ``x_{t+2}``. Rows are planned from the layout alone,
before any feature is read, so an illegal address never enters a gather.

Letters: B sequences, S tokens per sequence, R rows per sequence, M supervised rows of the batch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from eaglelab.data.needed import NeededRows

SuperviseRule = Literal["source", "advanced", "predicted"]


@dataclasses.dataclass
class Rows:
    """The compiled training plan of a batch. Knows addresses, not models.

    Every sequence has its legal rows first, in token order; the remaining slots of a shorter sequence are
    fillers: ``legal_BR`` is False there and their address repeats a legal one of the batch.

    Attributes:
        source_BR: int64, address ``b * S + t`` of each row's source token in the flattened batch.
        legal_BR: bool, True for rows, False for fillers.
        supervised_BR: bool, rows that enter the loss.
        segment_BR: int64 segment id, -1 for fillers.
        position_BR: int64 position of the source token in its segment, 0 for fillers.
        remaining_BR: int64, tokens of the segment after the source (>= 1 for rows): how far ``t + k`` may go.
        supervised_M: int64, the supervised rows as slots ``b * R + r``.
        causal: True when every sequence is one segment, so that plain causal attention over the row slots
            is already segment-isolated.
        needed: what a variant's rollout needs of the rows, where that was planned.
    """

    source_BR: Tensor
    legal_BR: Tensor
    supervised_BR: Tensor
    segment_BR: Tensor
    position_BR: Tensor
    remaining_BR: Tensor
    supervised_M: Tensor
    causal: bool
    needed: NeededRows | None = None

    @property
    def num_supervised(self) -> int:
        """Rows that enter the loss; 0 means that the update must be skipped."""
        return self.supervised_M.numel()

    def gather(self, x_BS: Tensor, offset: int = 0) -> Tensor:
        """Read ``x[t + offset]`` for every row: ``[B, S, ...] -> [B, R, ...]``.

        Where ``t + offset`` leaves the segment the segment's last token is read instead, never an illegal
        address; :meth:`reaches` says which rows those are. Offsets are 0 (source), 1 (advanced token and
        feature target) and up (rollout steps).
        """
        assert offset >= 0, "rows only look forward"
        address_BR = self.source_BR + self.remaining_BR.clamp(max=offset)
        return x_BS.flatten(0, 1)[address_BR]

    def reaches(self, offset: int) -> Tensor:
        """bool [B, R]: rows whose ``t + offset`` is still a token of their segment."""
        return self.remaining_BR >= offset if offset else self.legal_BR

    def supervised_at(self, step: int) -> Tensor:
        """bool [B, R]: roots whose rollout step ``step`` lands on a supervised row ``t + step``.

        The root itself need not be supervised: the flag belongs to the predicted row.
        """
        legal_BR = self.remaining_BR >= 1 + step
        R = legal_BR.shape[1]
        slot_R = torch.arange(R, device=legal_BR.device)
        landing_BR = (slot_R + step).clamp(max=max(R - 1, 0)).expand_as(legal_BR)
        return legal_BR & self.supervised_BR.gather(1, landing_BR)

    def visible(self) -> Tensor:
        """bool [B, R, R]: key row ``k`` is in the causal context of query row ``q``.

        Same segment and not later. Unsupervised rows are context too. A filler sees itself only.
        """
        R = self.legal_BR.shape[1]
        slot_R = torch.arange(R, device=self.legal_BR.device)
        same_BRR = self.segment_BR[:, :, None] == self.segment_BR[:, None, :]
        past_RR = slot_R[None, :] <= slot_R[:, None]
        legal_BRR = self.legal_BR[:, :, None] & self.legal_BR[:, None, :]
        itself_RR = torch.eye(R, dtype=torch.bool, device=slot_R.device)
        return (same_BRR & past_RR & legal_BRR) | itself_RR

    def supervised_slots(self, step: int = 0) -> Tensor:
        """int64 [M], roots ``b * R + r`` whose rollout step ``step`` enters the loss."""
        return self.supervised_at(step).flatten().nonzero().flatten() if step else self.supervised_M

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Rows:
        """A copy on ``device``."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) or (field.name == "needed" and value is not None)
        }
        return dataclasses.replace(self, **moved)


def first_seen(rows: Rows) -> Tensor:
    """int64 [B, R]: the first row of each row's segment; a filler sees itself only. It never falls along R."""
    R = rows.legal_BR.shape[1]
    slot_1R = torch.arange(R, device=rows.legal_BR.device)[None]
    begins_BR = ~rows.legal_BR
    begins_BR[:, 1:] |= rows.segment_BR[:, 1:] != rows.segment_BR[:, :-1]
    return torch.where(begins_BR, slot_1R, 0).cummax(dim=1).values


def rule_offset(supervise: str) -> int:
    """How far after the source lies the token that decides: 0 for ``source``, 1 ``advanced``, 2 ``predicted``.

    Raises:
        ValueError: no such rule.
    """
    rules = get_args(SuperviseRule)
    if supervise not in rules:
        raise ValueError(f"supervise={supervise!r} is not one of {', '.join(rules)}")
    return rules.index(supervise)


def compile_rows(
    valid_BS: Tensor,
    segment_BS: Tensor,
    position_BS: Tensor,
    answer_BS: Tensor,
    *,
    supervise: SuperviseRule = "advanced",
) -> Rows:
    """Plan the soft rows of a batch (contracts of the family, section 2).

    A row exists where ``t`` and ``t + 1`` are valid tokens of one segment. It is supervised when the token
    named by ``supervise`` lies in an answer: ``source`` looks at ``x_t`` (the published EAGLE-1 scripts for
    Vicuna and Llama-2), ``advanced`` at ``x_{t+1}`` (what decoding needs: the first draft of a round reads
    the last prompt feature and the first answer token), ``predicted`` at ``x_{t+2}``, which must exist.

    Args:
        valid_BS: bool, token exists.
        segment_BS: int64, segment id per token; anything on padding.
        position_BS: int64, position inside the segment.
        answer_BS: bool, token belongs to an answer.
        supervise: the row rule.

    Raises:
        ValueError: unknown rule, or shapes that differ.
    """
    offset = rule_offset(supervise)
    shapes = {tuple(x.shape) for x in (valid_BS, segment_BS, position_BS, answer_BS)}
    if len(shapes) != 1 or valid_BS.dim() != 2:
        raise ValueError(f"valid, segment, position and answer must share one shape [B, S], got {shapes}")

    B, S = valid_BS.shape
    device = valid_BS.device
    valid_BS, answer_BS = valid_BS.bool(), answer_BS.bool()
    follows_BS = torch.zeros(B, S, dtype=torch.bool, device=device)
    follows_BS[:, :-1] = valid_BS[:, :-1] & valid_BS[:, 1:] & (segment_BS[:, :-1] == segment_BS[:, 1:])

    # remaining: distance to the first later index that nothing follows
    index_S = torch.arange(S, device=device)
    stop_BS = torch.where(follows_BS, S, index_S)
    remaining_BS = stop_BS.flip(1).cummin(1).values.flip(1) - index_S

    count_B = follows_BS.sum(1)
    R = int(count_B.max()) if count_B.numel() else 0
    order_BR = (~follows_BS).to(torch.int8).argsort(dim=1, stable=True)[:, :R]
    legal_BR = torch.arange(R, device=device) < count_B[:, None]
    address_BR = order_BR + S * torch.arange(B, device=device)[:, None]
    if R:
        filler = address_BR[legal_BR][0]
        address_BR = torch.where(legal_BR, address_BR, filler)

    remaining_BR = remaining_BS.flatten()[address_BR] * legal_BR
    named_BR = answer_BS.flatten()[address_BR + remaining_BR.clamp(max=offset)]
    supervised_BR = legal_BR & (remaining_BR >= offset) & named_BR
    segment_BR = torch.where(legal_BR, segment_BS.flatten()[address_BR], -1)
    return Rows(
        source_BR=address_BR,
        legal_BR=legal_BR,
        supervised_BR=supervised_BR,
        segment_BR=segment_BR,
        position_BR=position_BS.flatten()[address_BR] * legal_BR,
        remaining_BR=remaining_BR,
        supervised_M=supervised_BR.flatten().nonzero().flatten(),
        causal=bool((~legal_BR | (segment_BR == segment_BR[:, :1])).all()) if R else True,
    )
