"""Memory of a training step on one device, derived from shapes; tests hold it against measured peaks.

A step has two moments that can be its peak: the end of the target's own pass, and the last loss chunk or the start of
the backward, when everything that the drafter keeps is there.

Letters: B sequences, S tokens, R rows, N = B R, M supervised rows, m rows of a loss chunk, d hidden width, I MLP width,
V vocabulary, K draft vocabulary, T taps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from eaglelab.drafters import DrafterConfig
from eaglelab.drafters.native import SCORES
from eaglelab.objectives.chunked import chunk_rows
from eaglelab.target.shape import TargetShape
from eaglelab.target.unpacking import MASKED_LENGTH
from eaglelab.training.activations import WIDE, Numerics, again, kept
from eaglelab.training.flops import Load, drafter_matrices, key_width
from eaglelab.variants.optim import OptimConfig
from eaglelab.variants.rollout import Rollout


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a training is spread.

    Attributes:
        devices: processes, one device each.
        sharded: the target's layers are shared out over them (``trainer=fsdp``).
        drafter: ``whole`` on each; ``sharded``: between steps each keeps its share of weights and optimizer state
            (``trainer=fsdp``); ``partitioned``: whole weights, and a share of optimizer state and of the weights that
            it moves (``trainer=deepspeed``).
    """

    devices: int = 1
    sharded: bool = False
    drafter: Literal["whole", "sharded", "partitioned"] = "whole"

    @property
    def shares(self) -> int:
        """Of the drafter's optimizer state."""
        return 1 if self.drafter == "whole" else self.devices


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        target: its weights; of a sharded one this device's share, what stays whole, and the layers at hand.
        drafter: weights in fp32 and rotary tables, and with mixed precision the copies that matrix products read.
        gradients: of the drafter; with several processes also the buckets that they are exchanged in, or the share
            that is kept of their mean.
        optimizer: its state.
        features: what the target said about the micro-batch: taps and last features; states of the rollout.
        kept: what the drafter keeps for its backward.
        chunk: logits, distributions and their gradients for one chunk of supervised rows, or the first gradients of
            the backward, with a step that is computed again for it, where those are larger.
        target_pass: the target's pass at its largest; over before the drafter starts, unless
        ahead: it is the pass over the next batch, beside the drafter's step.
    """

    target: int
    drafter: int
    gradients: int
    optimizer: int
    features: int
    kept: int
    chunk: int
    target_pass: int
    ahead: bool = False

    @property
    def resident(self) -> int:
        """There throughout."""
        return self.target + self.drafter + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        step = self.features + self.kept + self.chunk
        return self.resident + (self.target_pass + step if self.ahead else max(self.target_pass, step))


def step_memory(
    target: TargetShape,
    drafter: DrafterConfig,
    kinds: Sequence[Rollout],
    load: Load,
    optim: OptimConfig,
    numerics: Numerics,
    placement: Placement = Placement(),
    *,
    online: bool = True,
    target_rows: int | None = None,
    ahead: bool = False,
) -> Memory:
    """The step that needs most, of all kinds of step of the training.

    Args:
        kinds: see :func:`~eaglelab.variants.rollout.rollouts`.
        online: the target runs; False where features come from a store, and only embedding and head are loaded.
        target_rows: rows that it takes at a time; None: those of the batch.
        ahead: it takes them one batch early (:mod:`eaglelab.features.ahead`).
    """

    def moment(rollout: Rollout) -> tuple[int, int, int]:
        held = _features(drafter, rollout, load, numerics)
        repeated = again(drafter, rollout, load, numerics)
        peak = max(
            _chunk(target, drafter, rollout, load, numerics),
            repeated + _backward(drafter, rollout, load, numerics),
            repeated + _block(drafter, rollout, load, numerics),
        )
        return held, kept(drafter, rollout, load, numerics).total(), peak

    features, saved, chunk = max((moment(one) for one in kinds), key=sum)
    last = kinds[-1]
    count = drafter_parameters(drafter, last)
    copies = count * numerics.activation + _head_copy(target, last, numerics) if numerics.mixed else 0
    tables = 2 * drafter.max_position_embeddings * drafter.head_dim * WIDE
    trained = count if last.trains_head or not last.own_head else count - _head(drafter)
    return Memory(
        target=_target_weights(target, numerics, placement, online),
        drafter=count * WIDE + copies + tables + _weight_share(placement, count, trained),
        gradients=trained * WIDE + _gradient_exchange(placement, trained),
        optimizer=-(-_optimizer_state(drafter, last, optim, trained) // placement.shares),
        features=features,
        kept=saved,
        chunk=chunk,
        target_pass=_target_pass(target, drafter, load, numerics, target_rows) if online else 0,
        ahead=online and ahead,
    )


def drafter_parameters(drafter: DrafterConfig, rollout: Rollout) -> int:
    """Numbers in the drafter's weights, its own head included; the target's embedding and head are not its own."""
    d = drafter.hidden_size
    matrices = sum(rows * columns for rows, columns in drafter_matrices(drafter, fused=rollout.own_head))
    bias = d if drafter.fc_bias else 0
    if not rollout.own_head:
        return matrices + bias + d  # one norm
    return matrices + bias + 4 * d + (drafter.num_taps * d if drafter.fc_norm else 0) + _head(drafter)


def _head(drafter: DrafterConfig) -> int:
    return (drafter.draft_vocab_size or drafter.vocab_size) * drafter.hidden_size


def _head_copy(target: TargetShape, rollout: Rollout, numerics: Numerics) -> int:
    """The target's head in half precision, where it is kept in fp32."""
    return target.vocab_size * target.hidden_size * numerics.activation if numerics.target > numerics.activation else 0


def _optimizer_state(drafter: DrafterConfig, rollout: Rollout, optim: OptimConfig, trained: int) -> int:
    """AdamW: two moments; Muon: one for matrices other than the head."""
    if optim.name == "adamw":
        return 2 * trained * WIDE
    matrices = sum(rows * columns for rows, columns in drafter_matrices(drafter, fused=rollout.own_head))
    return (matrices + 2 * (trained - matrices)) * WIDE


def _weight_share(placement: Placement, count: int, trained: int) -> int:
    """Of the weights, beside the whole ones that a step works on."""
    if placement.shares == 1:
        return 0
    return -(-(count if placement.drafter == "sharded" else trained) // placement.shares) * WIDE


def _gradient_exchange(placement: Placement, trained: int) -> int:
    """DDP's buckets are there throughout, ZeRO's share of the mean beside the gradients of the passes; FSDP's comes
    when the whole weights are given up, and is smaller than those."""
    if placement.devices == 1 or placement.drafter == "sharded":
        return 0
    return -(-trained // placement.shares) * WIDE


def _target_weights(target: TargetShape, numerics: Numerics, placement: Placement, online: bool) -> int:
    outside = target.embedding + target.head
    if not online:
        return outside * numerics.target
    layers = target.parameters - outside
    if placement.sharded and placement.devices > 1:
        layers = -(-layers // placement.devices) + 2 * target.layer  # the layer that runs, and the next one
    return (outside + layers) * numerics.target


def _target_pass(
    target: TargetShape, drafter: DrafterConfig, load: Load, numerics: Numerics, rows: int | None = None
) -> int:
    """Streams that are tapped, and one layer at work: the stream, its normed copy, and the MLP's three products or the
    attention's queries, keys, values and output, whichever is more. Nothing is kept for a backward."""
    d, t = target.hidden_size, numerics.target
    streams = drafter.num_taps + (1 if drafter.num_taps > 1 else 0)
    width, keys = target.attention_width, 2 * target.key_value_width
    layer = 2 * d + max(3 * target.intermediate_size, 2 * width + keys + 2 * width)
    together = min(rows or load.sequences, load.sequences)
    in_pass = load.tokens * together // load.sequences
    # in parts, the streams of one are there beside those of all
    bytes_ = (load.tokens * streams * d + in_pass * (layer + (streams * d if together < load.sequences else 0))) * t
    if target.dense_attention:
        return bytes_ + together * load.length**2 * (2 * target.config.num_attention_heads + 1) * t
    masked = load.packed and load.length <= MASKED_LENGTH
    return bytes_ + (together * load.length**2 * (t + 2) if masked else 0)


def _features(drafter: DrafterConfig, rollout: Rollout, load: Load, numerics: Numerics) -> int:
    """Taps of the rows, last features, and what the rollout has in hand: its newest state, noise, and, where all steps
    share one context, the keys and values of every step before they were spread to all heads."""
    d, a = drafter.hidden_size, numerics.activation
    view = (load.row_slots * drafter.num_taps + load.tokens) * d * numerics.target
    noise = load.row_slots * d * WIDE if rollout.noise else 0
    keys = 0 if drafter.num_key_value_heads == drafter.num_attention_heads else 2 * key_width(drafter)
    states = d + (keys * (rollout.steps - 1) if rollout.own_head else 0)
    return view + noise + load.root_slots(rollout.steps) * (states * a if rollout.steps > 1 else 0)


def _chunk(target: TargetShape, drafter: DrafterConfig, rollout: Rollout, load: Load, numerics: Numerics) -> int:
    """The teacher's distributions and the drafter's logits, over which their gradient is written; or before them the
    teacher's logits. A trained head has its gradient too, and the states of all steps are there in one piece."""
    rounded = numerics.activation if numerics.mixed else 0  # logits before they are widened
    V, M, S = target.vocab_size, load.loss_rows, rollout.steps
    if not rollout.own_head:
        return min(chunk_rows(V), M) * V * (2 * WIDE + rounded)
    proposed = drafter.draft_vocab_size or drafter.vocab_size
    rows = min(chunk_rows(proposed, S), M)
    drafted = rows * proposed * (S * (WIDE + rounded) + WIDE)
    drafted += _head(drafter) * (WIDE + rounded) if rollout.trains_head else 0
    if drafter.draft_vocab_size:
        drafted += _head(drafter) * numerics.target  # the target's head, rows of the draft vocabulary
    teacher = min(chunk_rows(V), M) * V * numerics.target
    return max(teacher, drafted) + M * S * drafter.hidden_size * numerics.activation


def _backward(drafter: DrafterConfig, rollout: Rollout, load: Load, numerics: Numerics) -> int:
    """Gradients at the widest place of the backward, the MLP's product; the loss has released its rows by then."""
    released = load.loss_rows * drafter.hidden_size * (numerics.activation + (0 if rollout.own_head else 2 * WIDE))
    wide = 3 * drafter.intermediate_size + 2 * drafter.hidden_size
    return max(load.root_slots(rollout.steps) * wide * numerics.activation - released, 0)


def _block(drafter: DrafterConfig, rollout: Rollout, load: Load, numerics: Numerics) -> int:
    """Scores, weights and their gradients of one block of rows, in the backward of attention."""
    if not numerics.written_out or rollout.steps == 1:
        return 0
    entries = load.sequences * drafter.num_attention_heads * load.rows_each
    rows = min(max(SCORES // entries, 16), MASKED_LENGTH, load.roots_each(rollout.steps))
    return entries * rows * (2 * WIDE + 2 * numerics.activation)
