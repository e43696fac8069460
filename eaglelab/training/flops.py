"""Floating point operations of a training step, counted from shapes.

Matrix products only, a multiplication and an addition each, as ``torch.utils.flop_counter`` counts them; attention
counts every pair of rows that the kernel is given, the masked half of a causal square included.

Letters: B sequences, S tokens, R rows, N = B R, M supervised rows, d hidden width, I MLP width, H heads, G key/value
heads, D head width, U roots of a sequence, V vocabulary, K draft vocabulary, T taps, s rollout step.
"""

from __future__ import annotations

import dataclasses

from eaglelab.data.needed import WORTH
from eaglelab.drafters import DrafterConfig
from eaglelab.drafters.native import flash_block
from eaglelab.target.shape import TargetShape
from eaglelab.variants.contract import Contract
from eaglelab.variants.optim import OptimConfig
from eaglelab.variants.rollout import Rollout, rollouts

MUON_ITERATIONS = 5


@dataclasses.dataclass(frozen=True)
class Load:
    """One micro-batch of one process, as kernels see it.

    Attributes:
        sequences: B.
        length: S, tokens of each, padding included.
        rows: R, row slots of each; None: S - 1, as for a single segment without padding.
        supervised: M, rows in the loss of the whole micro-batch, at each rollout step; None: all.
        roots: rows of each sequence that a rollout of one step computes, the others giving keys and values only; None:
            all.
        reach: how many more for each further step: one for each answer behind a prompt.
        span: keys that a row is multiplied with; None: all of its sequence.
        target_span: the same in the target's own pass; None: all.
        packed: several segments in a sequence.
    """

    sequences: int
    length: int
    rows: int | None = None
    supervised: int | None = None
    span: float | None = None
    target_span: float | None = None
    packed: bool = False
    roots: int | None = None
    reach: float = 1.0

    @property
    def tokens(self) -> int:
        """B S."""
        return self.sequences * self.length

    @property
    def row_slots(self) -> int:
        """N."""
        return self.sequences * self.rows_each

    @property
    def rows_each(self) -> int:
        """R."""
        return self.length - 1 if self.rows is None else self.rows

    def roots_each(self, steps: int) -> int:
        """U, rows of each sequence that a rollout of ``steps`` steps computes."""
        needed = self.rows_each if self.roots is None else max(self.roots + round(self.reach * (steps - 1)), 1)
        return self.rows_each if needed >= WORTH * self.rows_each else needed

    def root_slots(self, steps: int) -> int:
        """B U."""
        return self.sequences * self.roots_each(steps)

    @property
    def loss_rows(self) -> int:
        """M."""
        return self.row_slots if self.supervised is None else self.supervised


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """Of one optimizer step of one process.

    Attributes:
        target: the frozen target's pass.
        drafter: projections and MLP, forward and backward; attention apart.
        attention: the drafter's.
        head: token heads of teacher and drafter, forward and backward.
        optimizer: Muon's orthogonalisation; AdamW multiplies no matrices.
    """

    target: float
    drafter: float
    attention: float
    head: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.target + self.drafter + self.attention + self.head + self.optimizer

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, factor: float) -> StepFlops:
        return StepFlops(*(factor * x for x in dataclasses.astuple(self)))


def step_flops(
    target: TargetShape,
    drafter: DrafterConfig,
    contract: Contract,
    load: Load,
    optim: OptimConfig | None = None,
    *,
    online: bool = True,
) -> StepFlops:
    """One optimizer step of one process, averaged over the kinds of step of the training.

    Args:
        target: see :meth:`TargetShape.of_model` for a loaded one: ``of_model(target.model)``.
        drafter: ``module.drafter_config``.
        contract: ``module.contract``; it tells the variant.
        load: a micro-batch.
        optim: its micro-batches per step and its optimizer; None: one, AdamW.
        online: the target runs; False where features come from a store.

    Raises:
        ValueError: a variant whose step is not known (:func:`~eaglelab.variants.rollout.rollouts`).
    """
    micro = [_micro_batch(target, drafter, one, load, online) * one.share for one in rollouts(contract)]
    whole = sum(micro[1:], start=micro[0]) * (optim.accumulate if optim else 1)
    muon = optim is not None and optim.name == "muon"
    return dataclasses.replace(whole, optimizer=_muon(drafter, rollouts(contract)[-1]) if muon else 0.0)


def _micro_batch(target: TargetShape, drafter: DrafterConfig, rollout: Rollout, load: Load, online: bool) -> StepFlops:
    return StepFlops(
        target=_target(target, load) if online else 0.0,
        drafter=_drafter(drafter, rollout, load),
        attention=_attention(drafter, rollout, load),
        head=2.0 * load.loss_rows * _head_products(target, drafter, rollout),
        optimizer=0.0,
    )


def _target(target: TargetShape, load: Load) -> float:
    """Every weight once per token; q k^T and p v for every pair. The head belongs to the loss."""
    span = load.length if load.target_span is None else load.target_span
    return load.tokens * (2.0 * target.active + 4.0 * target.num_layers * target.attention_width * span)


def _drafter(drafter: DrafterConfig, rollout: Rollout, load: Load) -> float:
    """Products per row: one forward, one for the weight's gradient, one for the input's where something asks for it.

    Step 0 computes keys and values of all rows, everything else is of the roots.
    """
    d, steps = drafter.hidden_size, rollout.steps
    width, kv = query_width(drafter), 2 * key_width(drafter)
    inside = width * d + 3 * d * drafter.intermediate_size  # o_proj and MLP
    if rollout.own_head:  # fused drafter: the taps are fused once, attention reads 2d
        fuse = drafter.num_taps * d * d * (3 if drafter.fc_norm else 2)
        of_rows = fuse + 3 * 2 * d * kv
        of_roots = steps * 3 * (2 * d * width + inside) + (steps - 1) * 3 * 2 * d * kv
        return 2.0 * (load.row_slots * of_rows + load.root_slots(steps) * of_roots)
    fc = 2 * d * d
    # fc reads target features, or a detached state: no gradient of its input. Joint passes hand one through.
    asking = steps * 3 * (d * width + inside)
    if rollout.joint:  # all states but the first hand a gradient on
        keys = 2 * fc + 3 * d * kv
        return 2.0 * (load.row_slots * keys + load.root_slots(steps) * (asking + (steps - 1) * (keys + fc)))
    # keys and values come from one map, 2d wide, which is made of fc and two projections once for all passes
    keys, key_map = 2 * 2 * d * kv, 3 * kv * d * 2 * d
    of_roots = asking + steps * 2 * fc + (steps - 2) * keys + 3 * d * kv  # keys of the last pass are its own
    return 2.0 * (load.row_slots * keys + load.root_slots(steps) * of_roots + key_map)


def _attention(drafter: DrafterConfig, rollout: Rollout, load: Load) -> float:
    """Per pair: q k^T and p v forward; five products backward, of which one computes the scores again.

    Own keys of a row are element-wise, where they are not written out.
    """
    steps, roots = rollout.steps, load.roots_each(rollout.steps)
    span = float(load.rows_each)
    if load.span is not None:
        span = load.span
    elif (
        roots < load.rows_each and not load.packed
    ):  # blocks of the last rows of a sequence, each with all keys up to its end
        size = flash_block(roots)
        ends = [min(first + size, roots) for first in range(0, roots, size)]
        keys = sum((load.rows_each - roots + end) * (end - first) for first, end in zip([0, *ends], ends))
        span = keys / roots
    backward = 8 if rollout.dense else 10
    native = steps * (4 + backward) * span
    own = steps * (steps - 1) // 2 * 8 if rollout.dense else 0
    return load.root_slots(steps) * query_width(drafter) * float(native + own)


def _head_products(target: TargetShape, drafter: DrafterConfig, rollout: Rollout) -> float:
    """Per supervised row: the teacher's logits, the drafter's at every step, and what flows back.

    With an own head the steps that land on a row share its teacher, which is read twice where the draft vocabulary is
    smaller: once for its argmax, and once for the draft vocabulary alone.
    """
    d, V = drafter.hidden_size, target.vocab_size
    if not rollout.own_head:
        return d * 3 * V * rollout.steps
    proposed = drafter.draft_vocab_size or drafter.vocab_size
    teacher = V + (drafter.draft_vocab_size or 0)
    return d * (teacher + rollout.steps * proposed * (3 if rollout.trains_head else 2))


def _muon(drafter: DrafterConfig, rollout: Rollout) -> float:
    """Newton-Schulz on every matrix [a, b], a <= b: X X^T, its square, and their product with X."""
    flops = 0.0
    for rows, columns in drafter_matrices(drafter, fused=rollout.own_head):
        a, b = sorted((rows, columns))
        flops += MUON_ITERATIONS * (4.0 * a * a * b + 2.0 * a**3)
    return flops


def drafter_matrices(drafter: DrafterConfig, *, fused: bool) -> list[tuple[int, int]]:
    """Shapes of the drafter's weight matrices, an own head apart."""
    d, wide = drafter.hidden_size, drafter.intermediate_size
    width, kv = query_width(drafter), key_width(drafter)
    read = 2 * d if fused else d
    fc = (d, drafter.num_taps * d if fused else 2 * d)
    return [fc, (width, read), (kv, read), (kv, read), (d, width), (wide, d), (wide, d), (d, wide)]


def query_width(drafter: DrafterConfig) -> int:
    """H D."""
    return drafter.num_attention_heads * drafter.head_dim


def key_width(drafter: DrafterConfig) -> int:
    """G D."""
    return drafter.num_key_value_heads * drafter.head_dim
