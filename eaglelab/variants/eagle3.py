"""EAGLE-3: fuse three streams, feed own states back, predict tokens only (EAGLE-3 paper, section 3; ``cnets.py``).

| contract          | here                                                                       |
|-------------------|----------------------------------------------------------------------------|
| target state read | the streams entering decoder layers 2, L//2 and L-3, before any norm       |
| drafter input     | attention over [norm(e); norm(h)], 2d; h = fc of the streams, 3d -> d      |
| training context  | 7 steps of training-time test, gradients through all                       |
| objective         | soft cross entropy on the draft vocabulary, 0.8^s; no feature regression   |
| token head        | its own, over the draft vocabulary, trained                                |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from eaglelab.data.draft_vocabulary import DraftVocabulary
from eaglelab.drafters import DrafterConfig, FusedDrafter, RolloutContext
from eaglelab.objectives import distill_to_draft_vocabulary, smooth_l1
from eaglelab.target import FrozenTarget, Tap, default_taps, validate_taps
from eaglelab.variants.base import DraftingModule, Pass
from eaglelab.variants.optim import OptimConfig
from eaglelab.variants.view import View

Reduction = Literal["masked", "pinned"]
HeadInit = Literal["random", "target_rows"]


class Eagle3Module(DraftingModule):
    """EAGLE-3 training.

    Step ``s`` of root ``r`` reads its own state of step ``s - 1``, undetached, and the data's token ``x_{r+1+s}``;
    it is taught the target's distribution at ``r + 1 + s``.

    Args:
        target, optim: see :class:`DraftingModule`, as are the remaining keywords.
        taps: streams to fuse, as the decoder layers that they enter; None: 2, L//2, L-3.
        steps: of the training-time test, 1 to 10.
        decay: weight of step ``s`` is ``decay ** s``.
        reduction: ``masked`` divides a step's sum by its counted rows; ``pinned`` by all token slots, masked and
            padded ones included, as published (an ablation: its scale depends on padding).
        head_init: ``random``, as published, or ``target_rows`` copies the target head's rows.
        train_head: False freezes the head.
        draft_vocab_size: tokens that the drafter can propose; None: all of the target's.
        feature_weight: ablation of the paper: SmoothL1 between the normed state and the target's final feature.
    """

    variant = "eagle3"

    def __init__(
        self,
        target: FrozenTarget,
        optim: OptimConfig,
        *,
        taps: Sequence[Tap] | None = None,
        steps: int = 7,
        decay: float = 0.8,
        reduction: Reduction = "masked",
        head_init: HeadInit = "random",
        train_head: bool = True,
        draft_vocab_size: int | None = None,
        feature_weight: float = 0.0,
        drafter: dict[str, Any] | None = None,
        **shared: Any,
    ) -> None:
        if not 1 <= steps <= 10:
            raise ValueError(f"variant.steps={steps}: the training-time test takes 1 to 10 steps")
        for name, value, known in (("reduction", reduction, Reduction), ("head_init", head_init, HeadInit)):
            if value not in get_args(known):
                raise ValueError(f"variant.{name}={value!r} is not one of {', '.join(get_args(known))}")
        self.taps = default_taps(target.num_layers) if taps is None else validate_taps(taps, target.num_layers)
        self.steps = steps
        self.decay = decay
        self.reduction = reduction
        self.feature_weight = feature_weight
        switches = {
            "steps": steps,
            "decay": decay,
            "reduction": reduction,
            "head_init": head_init,
            "train_head": train_head,
            "feature_weight": feature_weight,
        }
        whole = draft_vocab_size is None or draft_vocab_size == target.vocab_size
        wanted = {name: value for name, value in (drafter or {}).items() if value is not None}
        shape = {"fc_bias": False} | wanted | {"draft_vocab_size": None if whole else draft_vocab_size}
        super().__init__(target, optim, switches=switches, drafter=shape, **shared)
        self._give_vocabulary(None if whole else draft_vocab_size)
        self._give_head(head_init, train_head)

    @classmethod
    def build_network(cls, config: DrafterConfig) -> FusedDrafter:
        return FusedDrafter(config)

    network: FusedDrafter

    def _give_vocabulary(self, size: int | None) -> None:
        if size is None:
            return
        if self.answer_counts is None:
            raise ValueError("a reduced draft vocabulary needs the answer tokens of the training data")
        counts_V = self.answer_counts()
        self.draft_vocabulary = DraftVocabulary.most_frequent(counts_V, size)
        self.report = {"draft_vocab_size": size, "answer_token_coverage": self.draft_vocabulary.coverage(counts_V)}
        self.network.d2t.copy_(self.draft_vocabulary.d2t)
        self.network.t2d.copy_(self.draft_vocabulary.t2d)

    def _give_head(self, init: HeadInit, train: bool) -> None:
        head = self.network.lm_head
        if init == "target_rows":
            rows_Kd = self.target.head_weight
            ids_K = self.network.ids_K
            with torch.no_grad():
                head.weight.copy_(rows_Kd if ids_K is None else rows_Kd[ids_K])
        head.weight.requires_grad_(train)

    def passes(self, view: View) -> Iterator[Pass]:
        context = RolloutContext(view.rows)
        state_BRd = self.network.fuse(view.taps_BRF)
        loss = torch.zeros((), device=state_BRd.device)
        means: dict[str, Tensor] = {}
        for step in range(self.steps):
            attend = context.own if step else context.native
            state_BRd = self.network(state_BRd, view.embedding(step), view.position(step), attend)
            step_loss, step_means = self.objective(state_BRd, view, step)
            loss = loss + self.decay**step * step_loss
            means |= {f"{name}/step{step}" if step else name: value for name, value in step_means.items()}
        yield Pass(loss, means)

    def objective(self, state_BRd: Tensor, view: View, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one step, normalised, and what to log about it."""
        slots_M = view.rows.supervised_slots(step)
        state_Md = state_BRd.flatten(0, 1)[slots_M]
        teacher_Md = view.teacher(step).flatten(0, 1)[slots_M]
        head, norm = self.network.lm_head, self.network.norm
        distilled = distill_to_draft_vocabulary(
            state_Md,
            teacher_Md,
            lambda x: head(norm(x)),
            view.target.lm_head,
            self.network.ids_K,
            parameters=[norm.weight, head.weight],
        )
        slots = view.tokens_BS.numel()
        loss = distilled.loss / self.row_count(slots if self.reduction == "pinned" else distilled.counted)
        if self.feature_weight:
            regression = smooth_l1(norm(state_Md), teacher_Md)
            loss = loss + self.feature_weight * regression / self.row_count(slots_M.numel())
        counted = distilled.counted.clamp(min=1)
        return loss, {
            "distillation": distilled.loss.detach() / counted,
            "accuracy": distilled.hits / counted,
            "recall@5": distilled.recall / counted,
            "argmax_coverage": distilled.counted / max(slots_M.numel(), 1),
            "state_norm": state_Md.detach().float().norm(dim=-1).mean() if slots_M.numel() else counted * 0,
        }
