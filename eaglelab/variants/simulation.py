"""Simulated acceptance: the drafter's chain along the data, without decoding.

Letters: B sequences, R rows, d hidden width, K chain depth.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from eaglelab.drafters import DraftNetwork, Head, RolloutContext
from eaglelab.variants.view import View


class ChainSimulation(Metric):
    """Expected greedy chain acceptance over held-out rows.

    Every root whose next ``depth`` predicted rows are supervised starts a chain that reads its own predicted
    states and the data's tokens. A step hits when drafter and target agree on the most probable token; a chain's
    length counts its hits before the first miss, jointly per root. ``tau`` adds the bonus token, so a drafter
    that always agrees scores exactly ``1 + depth``. It equals real chain decoding where the data is the target's
    own greedy answer; elsewhere the chain continues on the data's token after a hit, and it is an estimate.

    Sums over processes, so it is right under data parallelism and over any number of batches.
    """

    full_state_update = False
    roots: Tensor
    prefix_hits: Tensor
    step_hits: Tensor
    feature_error: Tensor
    state_norm: Tensor
    state_drift: Tensor
    feature_roots: Tensor

    def __init__(self, depth: int) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"chain depth must be at least 1, got {depth}")
        self.depth = depth
        for name in ("roots", "feature_roots"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("prefix_hits", "step_hits", "feature_error", "state_norm", "state_drift"):
            self.add_state(name, torch.zeros(depth, dtype=torch.float64), dist_reduce_fx="sum")

    @torch.no_grad()
    def update(self, network: DraftNetwork, view: View) -> None:
        """Roll ``network`` out over the rows of ``view``."""
        rows = view.rows
        complete_BR = rows.supervised_at(0) & rows.supervised_at(self.depth - 1)
        root_M = complete_BR.flatten().nonzero().flatten()
        self.roots += root_M.numel()
        self.feature_roots += root_M.numel() if view.has_last_feature else 0
        if not root_M.numel():
            return
        context = RolloutContext(rows)
        state_BRd = network.fuse(view.taps_BRF)
        alive_M = torch.ones_like(root_M, dtype=torch.bool)
        for step in range(self.depth):
            attend = context.own if step else context.native
            before_Md = state_BRd.flatten(0, 1)[root_M]
            state_BRd = network(state_BRd, view.embedding(step), view.position(step), attend)
            predicted_Md = state_BRd.flatten(0, 1)[root_M]
            teacher_Md = view.teacher(step).flatten(0, 1)[root_M]
            hits_M = agreement(network, predicted_Md, teacher_Md, view.target.lm_head, view.teacher_logits)
            alive_M &= hits_M
            self.prefix_hits[step] += alive_M.sum()
            self.step_hits[step] += hits_M.sum()
            if view.has_last_feature:
                off_Md = network.head_input(predicted_Md) - teacher_Md
                self.feature_error[step] += off_Md.float().abs().mean(-1).sum()
            self.state_norm[step] += predicted_Md.float().norm(dim=-1).sum()
            moved_M = (predicted_Md - before_Md).float().norm(dim=-1)
            self.state_drift[step] += (moved_M / before_Md.float().norm(dim=-1).clamp(min=1e-6)).sum()

    def compute(self) -> dict[str, Tensor]:
        """``tau`` and, per depth k = 1..K: ``prefix@k`` (joint), ``hit@k``, ``feature_error@k`` (mean absolute
        distance of what the head reads to the target's last feature, where the data has it), ``norm@k`` of the draft
        state and its ``drift@k`` (distance from the state that it was drafted from, in units of that state's norm).
        """
        roots = self.roots.clamp(min=1)
        result = {"tau": 1 + self.prefix_hits.sum() / roots}
        series = {
            "prefix": self.prefix_hits,
            "hit": self.step_hits,
            **({"feature_error": self.feature_error} if self.feature_roots or not self.roots else {}),
            "norm": self.state_norm,
            "drift": self.state_drift,
        }
        for name, sums in series.items():
            result |= {f"{name}@{k + 1}": value for k, value in enumerate(sums / roots)}
        return {name: value.float() for name, value in result.items()}


def agreement(
    network: DraftNetwork,
    predicted_Md: Tensor,
    teacher_Mw: Tensor,
    target_head: Head,
    teacher_head: Head | None = None,
    chunk: int = 1024,
) -> Tensor:
    """bool [M]: the drafter's most probable token, as a target id, is the target's own.

    ``teacher_head`` reads the teacher rows; None: they are last features and ``target_head`` does.
    """
    teacher_head = teacher_head or target_head
    pieces = []
    for predicted_md, teacher_mw in zip(predicted_Md.split(chunk), teacher_Mw.split(chunk), strict=True):
        drafted_m = network.to_target_ids(network.logits(predicted_md, target_head).argmax(-1))
        pieces.append(drafted_m == teacher_head(teacher_mw).argmax(-1))
    return torch.cat(pieces)
