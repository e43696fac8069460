"""What the drafter keeps in memory between forward and backward, in bytes, counted from shapes.

Each line below is a tensor that autograd saves, with the operation that needs it. The weights themselves are not
counted. tests/training/test_memory.py holds the sum against the storages that a real step saves.

Letters: N rows, U those that are computed whole, M supervised rows, d hidden width, I MLP width, H heads, G key/value
heads, D head width, K draft vocabulary, T taps, s rollout step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from eaglelab.drafters import DrafterConfig
from eaglelab.target.unpacking import MASKED_LENGTH
from eaglelab.training.flops import Load, key_width, query_width
from eaglelab.variants.rollout import Rollout

WIDE = 4
"""Bytes of fp32: norms, softmaxes, losses and accumulated gradients."""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Sizes of numbers.

    Attributes:
        activation: bytes of what matrix products read and write: 4, or 2 with ``trainer.precision=bf16-mixed``.
        target: bytes of the target's weights and features.
        fused_norms: norms keep their input only. The composite kernel of the CPU, and of a bf16 input with fp32 weights
            on any device, keeps the normed values too.
        written_out: attention to own keys writes the scores of a block of rows out, as on every device but a CPU.
    """

    activation: int = 4
    target: int = 4
    fused_norms: bool = False
    written_out: bool = False

    @property
    def mixed(self) -> bool:
        """Whether matrix products work on copies in half precision."""
        return self.activation < WIDE

    def norm(self, width: int) -> int:
        """Of an RMSNorm in the path of gradients: its input, the inverse root mean square, the normed values."""
        return WIDE * (width + 1 + (0 if self.fused_norms else width))

    def norm_of_data(self, width: int) -> int:
        """Of an RMSNorm whose input needs no gradient: one tensor, for the gradient of its weight."""
        return WIDE * width


def kept(drafter: DrafterConfig, rollout: Rollout, load: Load, numerics: Numerics) -> Counter[str]:
    """Bytes that a micro-batch keeps for its backward, by part, when it keeps most.

    Joint steps are kept together; of separate ones the largest counts: the first, which works on all rows, or the last,
    which has most keys.
    """
    steps = [_step(drafter, rollout, load, numerics, step) for step in range(rollout.steps)]
    total = sum(steps, Counter()) if rollout.joint else max(steps, key=lambda parts: parts.total())
    if rollout.checkpointed:
        total = Counter(loss=total["loss"])
        each = (drafter.hidden_size + 2 * key_width(drafter)) * numerics.activation
        total["state and keys"] = (load.row_slots + (rollout.steps - 1) * load.root_slots(rollout.steps)) * each
    if rollout.own_head:
        total["fusion"] += load.row_slots * _fusion(drafter, numerics)
        total["loss"] += _head_sum(drafter, rollout)
    total["mask"] = 0 if rollout.checkpointed else _mask(rollout, load, numerics)
    return total


def again(drafter: DrafterConfig, rollout: Rollout, load: Load, numerics: Numerics) -> int:
    """Bytes of the costliest step while it is computed again in the backward, and of the gradients that the loss gave
    to the states of all steps, beside what :func:`kept` counts; 0 without checkpoints."""
    if not rollout.checkpointed:
        return 0
    N, U, a = load.row_slots, load.root_slots(rollout.steps), numerics.activation
    spread = drafter.num_key_value_heads != drafter.num_attention_heads

    def whole(step: int) -> int:
        parts = _step(drafter, dataclasses.replace(rollout, checkpointed=False), load, numerics, step)
        del parts["loss"]
        shared = 2 * query_width(drafter) * a * (U if step else N)  # its own keys and values, which are kept anyhow
        keys = 2 * query_width(drafter) * a * (N + step * U) if spread else 0
        return parts.total() - shared + keys

    states = rollout.steps * U * drafter.hidden_size * WIDE
    return states + max(whole(step) for step in range(rollout.steps)) + _mask(rollout, load, numerics)


def _mask(rollout: Rollout, load: Load, numerics: Numerics) -> int:
    masked = load.packed and load.rows_each <= MASKED_LENGTH
    return load.root_slots(rollout.steps) * load.rows_each * numerics.activation if masked else 0


def _step(drafter: DrafterConfig, rollout: Rollout, load: Load, numerics: Numerics, step: int) -> Counter[str]:
    N, U, M = load.row_slots, load.root_slots(rollout.steps), load.loss_rows
    d, a = drafter.hidden_size, numerics.activation
    here = N if step == 0 else U
    picked = U if step == 0 and U < N else 0  # what only queries read, gathered
    parts: Counter[str] = Counter()
    if rollout.own_head:
        reads = 3 if numerics.mixed and numerics.target == WIDE else 1  # an fp32 input is rounded for q, k and v each
        read = here * reads + picked if reads == 1 else here * 2 + (picked or here)
        parts["input"] = here * (numerics.norm_of_data(d) + numerics.norm(d)) + read * 2 * d * a
        parts["loss"] = M * (8 + d * a)  # which rows, gradient of the states
        if rollout.feature_loss:
            parts["loss"] += M * (numerics.norm(d) + 2 * d * WIDE)
        if drafter.recurrence == "post_norm":
            parts["output norm"] = U * numerics.norm(d)
    else:
        if rollout.joint:
            parts["input"] = here * 3 * d * a + picked * d * a  # [e; f] for fc, its output for q, k, v
        else:
            parts["input"] = U * d * a  # fc reads its data again
            parts["shared"] = _shared(drafter, load, numerics, step, load.root_slots(rollout.steps))
        parts["loss"] = M * (8 + 2 * d * WIDE + d * a)  # which rows; prediction and feature for SmoothL1; gradient
    parts["attention"] = _attention(drafter, rollout, load, numerics, step)
    parts["mlp"] = U * (numerics.norm(d) + a * (d + 3 * drafter.intermediate_size))  # gate, up, product
    return parts


def _attention(drafter: DrafterConfig, rollout: Rollout, load: Load, numerics: Numerics, step: int) -> int:
    """Per row: q and output, native and own keys and values (spread to all heads), log-sum-exp and own weights.

    All steps of a joint rollout read the same tensors of keys and values.
    """
    N, U = load.row_slots, load.root_slots(rollout.steps)
    width, heads, a = query_width(drafter), drafter.num_attention_heads, numerics.activation
    rotary = 2 * drafter.head_dim * WIDE  # cos and sin; in half precision one copy for q and one for k
    native = 0 if step and rollout.joint else 2 * width * a * N
    own = (min(step, 1) if rollout.joint else step) * 2 * width * a * U
    scores = heads * (1 + step) * WIDE
    if rollout.dense:
        scores += heads * load.rows_each * (WIDE + 2 * a)
    positions = rotary * (N if step == 0 and rollout.joint else U)
    if step == 0 and U < N and rollout.joint:  # q has its own
        positions = 2 * drafter.head_dim * a * (N + U)
    return (2 * width * a + scores) * U + native + own + positions


def _shared(drafter: DrafterConfig, load: Load, numerics: Numerics, step: int, roots: int) -> int:
    """What separate passes keep for each other: states, which are read once more when the last pass takes the gradient
    of their keys to the weights; that gradient, gathered so far; and the keys before they were spread to all heads.

    The first state is the target's feature itself, of which the needed rows are gathered.
    """
    N, a = load.row_slots, numerics.activation
    if step == 0:
        return roots * drafter.hidden_size * numerics.target if roots < N else 0
    keys = (N + (step - 1) * roots) * 2 * key_width(drafter) * a  # of earlier states
    spread = drafter.num_key_value_heads != drafter.num_attention_heads
    return step * roots * drafter.hidden_size * a + keys * (2 if spread else 1)


def _fusion(drafter: DrafterConfig, numerics: Numerics) -> int:
    """Per row: the taps that ``fc`` reads, where they are not the target's own tensors, and their norms."""
    read = drafter.num_taps * drafter.hidden_size
    copied = read * numerics.activation if drafter.fc_norm or numerics.activation != numerics.target else 0
    norms = numerics.norm_of_data(read) if drafter.fc_norm else 0
    return copied + norms


def _head_sum(drafter: DrafterConfig, rollout: Rollout) -> int:
    """The accumulated gradient of head and final norm, in fp32."""
    if not rollout.trains_head:
        return 0
    return WIDE * drafter.hidden_size * ((drafter.draft_vocab_size or drafter.vocab_size) + 1)
