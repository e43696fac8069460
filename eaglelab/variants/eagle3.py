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

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eaglelab.data.draft_vocabulary import DraftVocabulary
from eaglelab.data.needed import NeededRows
from eaglelab.drafters import DrafterConfig, FusedDrafter, RolloutContext
from eaglelab.drafters.config import Recurrence
from eaglelab.objectives import TeacherHeads, distill_to_draft_vocabulary, smooth_l1
from eaglelab.target import FrozenTarget, Tap, default_taps, validate_taps
from eaglelab.variants.base import DraftingModule, Pass
from eaglelab.variants.contract import Contract, require_not_negative, require_one_of
from eaglelab.variants.measures import Coverage, Measure
from eaglelab.variants.optim import OptimConfig
from eaglelab.variants.view import View

Reduction = Literal["masked", "pinned"]
HeadInit = Literal["random", "target_rows"]


@dataclasses.dataclass(kw_only=True)
class Eagle3Contract(Contract):
    """EAGLE-3's switches; those of the drafter's shape are keywords of :class:`Eagle3Module`.

    Attributes:
        steps: of the training-time test, 1 to 10.
        decay: weight of step ``s`` is ``decay ** s``.
        detach: ablation: the state that a step reads carries no gradient; keys still reach the weights.
        reduction: ``masked`` divides a step's sum by its counted rows; ``pinned`` by all token slots, masked and
            padded ones included, as published (an ablation: its scale depends on padding).
        head_init: ``random``, as published, or ``target_rows`` copies the target head's rows.
        train_head: False freezes the head.
        feature_weight: ablation of the paper: SmoothL1 between the normed state and the target's final feature.
    """

    steps: int = 7
    decay: float = 0.8
    detach: bool = False
    reduction: Reduction = "masked"
    head_init: HeadInit = "random"
    train_head: bool = True
    feature_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 10:
            raise ValueError(f"variant.steps={self.steps}: the training-time test takes 1 to 10 steps")
        require_not_negative(self, "decay", "feature_weight")
        require_one_of("reduction", self.reduction, Reduction)
        require_one_of("head_init", self.head_init, HeadInit)


class Eagle3Module(DraftingModule):
    """EAGLE-3 training.

    Step ``s`` of root ``r`` reads its own state of step ``s - 1``, undetached, and the data's token ``x_{r+1+s}``;
    it is taught the target's distribution at ``r + 1 + s``.

    Args:
        target, optim: see :class:`DraftingModule`; further keywords: its own and the fields of
            :class:`Eagle3Contract`.
        taps: streams to fuse, one or more, as the decoder layers that they enter; None: 2, L//2, L-3.
        draft_vocab_size: tokens that the drafter can propose; None: all of the target's.
        fc_norm: an RMSNorm on each stream before the fusion (EAGLE-3.1); off as published.
        recurrence: ``pre_norm``, as published: a step reads the output before the final norm; ``post_norm``: after it
            (EAGLE-3.1). Both are part of the drafter's shape: decoding does the same.
    """

    variant = "eagle3"
    has_steps = True
    contract_type = Eagle3Contract
    contract: Eagle3Contract

    def __init__(
        self,
        target: FrozenTarget,
        optim: OptimConfig,
        *,
        taps: Sequence[Tap] | None = None,
        draft_vocab_size: int | None = None,
        fc_norm: bool = False,
        recurrence: Recurrence = "pre_norm",
        drafter: dict[str, Any] | None = None,
        **shared: Any,
    ) -> None:
        self.taps = self.taps_for(target, taps)
        if draft_vocab_size is not None and not 1 <= draft_vocab_size <= target.vocab_size:
            raise ValueError(
                f"variant.draft_vocab_size={draft_vocab_size} must be between 1 and the target's vocabulary of "
                f"{target.vocab_size}"
            )
        whole = draft_vocab_size is None or draft_vocab_size == target.vocab_size
        wanted = {name: value for name, value in (drafter or {}).items() if value is not None}
        shape = {"fc_bias": False} | wanted | {"draft_vocab_size": None if whole else draft_vocab_size}
        shape |= {"fc_norm": fc_norm, "recurrence": recurrence}
        super().__init__(target, optim, drafter=shape, **shared)
        if self.contract.feature_weight and not self.source.has_last_feature:
            raise ValueError(
                f"variant.feature_weight={self.contract.feature_weight} needs the target's last features and the store "
                "keeps top-k distributions; cache with teacher=feature, or set variant.feature_weight=0"
            )
        self.coverage = Coverage()
        self._give_vocabulary(None if whole else draft_vocab_size)
        self._give_head(self.contract.head_init, self.contract.train_head)

    @classmethod
    def taps_for(cls, target: FrozenTarget, taps: Sequence[Tap] | None = None) -> tuple[Tap, ...]:
        if taps is None:
            return default_taps(target.num_layers)
        if not taps:
            raise ValueError("variant.taps=[] names no stream; give at least one layer, or null for the default three")
        return validate_taps(taps, target.num_layers)

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

    @property
    def num_steps(self) -> int:
        return self.contract.steps

    def passes(self, view: View) -> Iterator[Pass]:
        needed = self.needed(view.rows)
        context, roots = RolloutContext(view.rows, needed.slot_BU, needed.spans), view.of_needed(needed)
        state_BUd, states = self.network.fuse(view.taps_BRF), []
        for step in range(self.contract.steps):
            if step and self.contract.detach:
                state_BUd = state_BUd.detach()
            state_BUd = self._step(state_BUd, context, roots if step else view, step, needed)
            states.append(state_BUd)
        yield self.objective(states, view, needed)

    def _step(self, state: Tensor, context: RolloutContext, view: View, step: int, needed: NeededRows) -> Tensor:
        """From the states of all rows (step 0) or of the needed ones to the next states of the needed ones."""

        def forward(state: Tensor, context: RolloutContext) -> Tensor:
            attend = context.own if step else context.native
            slot_BU = None if step else needed.slot_BU
            return self.network(state, view.embedding(step), view.position(step), attend, slot_BU)

        if not self.checkpoint_steps or not torch.is_grad_enabled():
            return forward(state, context)
        before = context.branch()

        def again(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            branch = before.branch()
            return forward(state, branch), *branch.newest

        reached_BUd, k, v = checkpoint(again, state, use_reentrant=False)
        (context.add_own if step else context.add_native)(k, v)
        return reached_BUd

    def step_weights(self) -> Tensor:
        """[S], of each step's mean."""
        return self.contract.decay ** torch.arange(self.contract.steps, device=self.device, dtype=torch.float32)

    def objective(self, states: list[Tensor], view: View, needed: NeededRows) -> Pass:
        """The weighted losses of all steps; ``states``: [B, U, d] each."""
        network, weight_S = self.network, self.step_weights()
        root_MS, lands_MS = needed.root_MS, needed.lands_MS
        state_MSd = torch.stack([x.flatten(0, 1)[at_M] for x, at_M in zip(states, root_MS.unbind(1), strict=True)], 1)
        teacher_Mw = view.teacher().flatten(0, 1)[needed.landing_M]
        ids_K, slots = network.ids_K, view.tokens_BS.numel()
        pinned = self.contract.reduction == "pinned"
        distilled = distill_to_draft_vocabulary(
            state_MSd,
            lands_MS,
            teacher_Mw,
            lambda x: network.logits(x, view.target.lm_head),
            TeacherHeads(view.teacher_logits, None if ids_K is None else view.drafted_logits(ids_K), ids_K),
            lambda counted_S: weight_S / self.row_count(slots if pinned else counted_S),
            parameters=network.head_parameters,
        )
        loss = distilled.loss
        terms: list[Measure] = []
        measures: dict[str, Measure] = {}
        for step, weight in enumerate(weight_S):
            rows, counted, soft = needed.loss[step].numel(), distilled.counted_S[step], distilled.soft_S[step]
            state_Md, lands_M1 = state_MSd[:, step], lands_MS[:, step, None]
            terms.append((weight * soft, slots if pinned else counted))
            tail = f"/step{step}" if step else ""
            measures[f"distillation{tail}"] = soft, counted
            measures[f"accuracy{tail}"] = distilled.hits_S[step], counted
            measures[f"recall@5{tail}"] = distilled.recall_S[step], counted
            measures[f"argmax_coverage{tail}"] = counted, rows
            norm_M1 = state_Md.detach().float().norm(dim=-1, keepdim=True)
            measures[f"state_norm{tail}"] = (norm_M1 * lands_M1).sum(), rows
            if view.has_last_feature:
                regression = self._regression(state_Md, teacher_Mw, lands_M1)
                measures[f"regression{tail}"] = regression.detach(), rows
                if self.contract.feature_weight:
                    part = weight * self.contract.feature_weight * regression
                    loss = loss + part / self.row_count(rows)
                    terms.append((part.detach(), rows))
        return Pass(loss, terms, measures)

    def _regression(self, state_Md: Tensor, teacher_Md: Tensor, lands_M1: Tensor) -> Tensor:
        """Distance of what the head reads to the target's last feature, summed over the rows that have a state."""
        with nullcontext() if self.contract.feature_weight else torch.no_grad():
            predicted_Md = self.network.head_input(state_Md).to(torch.promote_types(teacher_Md.dtype, state_Md.dtype))
            return smooth_l1(torch.where(lands_M1, predicted_Md, teacher_Md), teacher_Md)

    # ---- how much of what the target says can be drafted -----------------------------------------------------

    def observe(self, measures: dict[str, Measure]) -> None:
        self.coverage.update(*measures["argmax_coverage"])

    def on_train_end(self) -> None:
        if self.draft_vocabulary is not None:
            covered, rows = self.coverage.compute().tolist()
            share = covered / max(rows, 1)
            self.report["argmax_coverage"] = {"covered": covered, "supervised_rows": rows, "share": share}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["progress"]["argmax_coverage"] = self.coverage.compute().tolist()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.coverage.reset()
        if self.global_rank == 0:
            self.coverage.update(*checkpoint["progress"].get("argmax_coverage", (0, 0)))
