"""What one training step costs: time and its split, and peak memory, on a synthetic target of a given shape.

Letters: B sequences, S tokens.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eaglelab.data import Batch, compile_rows
from eaglelab.evaluation.alternation import Spread
from eaglelab.features.source import Features
from eaglelab.kernels import KERNEL_CHOICES, KernelChoice
from eaglelab.target import FINAL, FrozenTarget, HeadOnlyTarget, Tap
from eaglelab.target.random_llama import LlamaShape
from eaglelab.variants import VARIANTS, DraftingModule, OptimConfig, View

Step = functools.partial[float]
MMAP_THRESHOLD = -3  # glibc's mallopt
PRECISIONS = ("32-true", "bf16-mixed")
LABELS = {"target": "eaglelab::target", "head_and_loss": "eaglelab::head_and_loss", "optimizer": "Optimizer.step"}


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Where a step runs, in which numbers, and on what.

    Attributes:
        device: ``cpu`` or ``cuda``.
        precision: as ``trainer.precision``: ``32-true``, or ``bf16-mixed`` with a target in bfloat16. The drafter's
            weights are float32 either way.
        random_features: of a target without layers: only embedding and head exist, so that any width can be measured
            where the whole target would not fit.
        kernels: as in a training: ``auto``, or ``torch`` for PyTorch's operations alone.
        threads: of the process that measures.
    """

    device: str = "cpu"
    precision: str = "32-true"
    random_features: bool = False
    kernels: KernelChoice = "auto"
    threads: int = dataclasses.field(default_factory=torch.get_num_threads)

    def __post_init__(self) -> None:
        known: dict[str, Sequence[str]] = {
            "device": ("cpu", "cuda"),
            "precision": PRECISIONS,
            "kernels": KERNEL_CHOICES,
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)} is unknown: use {' or '.join(values)}")

    @property
    def dtype(self) -> torch.dtype:
        """Of the target, its features, and the drafter's matrix products."""
        return torch.float32 if self.precision == "32-true" else torch.bfloat16

    def autocast(self) -> torch.autocast:
        """What the trainer puts around a step."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16-mixed")


class RandomFeatures:
    """Features as random as the target's weights: [B, S, d] for each stream, made once and the same for all."""

    has_last_feature = True

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target
        self._drawn: dict[tuple[int, ...], dict[Tap, Tensor]] = {}

    def plan(self, batch: Batch) -> None:
        """Nothing to plan: no target is run."""

    def of(self, batch: Batch, taps: tuple[Tap, ...]) -> Features:
        B, S = batch.tokens_BS.shape
        drawn = self._drawn.setdefault((B, S), {})
        for tap in (*taps, FINAL):
            if tap not in drawn:
                shape = B, S, self.target.hidden_size
                drawn[tap] = torch.randn(shape, device=self.target.device, dtype=self.target.dtype)
        return Features(drawn, drawn[FINAL], self.target.lm_head)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama-shaped random target and a batch for it.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_heads, vocab_size: of the target (and so of the drafter).
        num_kv_heads: heads of keys and values; None: as many as ``num_heads``.
        batch, length: sequences, and tokens of each.
        segments: conversations of equal length packed in a sequence.
        answer: share of each, at its end, that is the answer; with 1 every row is supervised.
    """

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 12
    num_heads: int = 3
    vocab_size: int = 2048
    num_kv_heads: int | None = None
    batch: int = 4
    length: int = 512
    segments: int = 1
    answer: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.answer <= 1:
            raise ValueError(f"shape.answer={self.answer} is a share of each conversation, above 0 and at most 1")
        for name in ("batch", "length", "segments"):
            if getattr(self, name) < 1:
                raise ValueError(f"shape.{name}={getattr(self, name)} must be at least 1")
        _ = self.llama
        if self.length < 8 * self.segments:
            raise ValueError(f"shape.length={self.length} is short for {self.segments} conversations; give 8 each")

    @property
    def llama(self) -> LlamaShape:
        """The target's."""
        groups = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        sizes = self.hidden_size, self.intermediate_size, self.num_layers, self.num_heads, groups, self.vocab_size
        return LlamaShape(*sizes, tied=True)

    @property
    def positions(self) -> int:
        return max(self.length, 64)

    def target(self, conditions: Conditions | None = None) -> FrozenTarget:
        """The random target; without its layers where features are drawn at random."""
        conditions = conditions or Conditions()
        where: Any = {"positions": self.positions, "dtype": conditions.dtype, "device": conditions.device}
        if conditions.random_features:
            return HeadOnlyTarget.random(self.llama, **where)
        return FrozenTarget(self.llama.build(**where))

    def make_batch(self, length: int | None = None) -> Batch:
        B, S = self.batch, length or self.length
        tokens_BS = torch.randint(self.vocab_size, (B, S), generator=torch.Generator().manual_seed(0))
        valid_BS = torch.ones(B, S, dtype=torch.bool)
        each = max(S // self.segments, 4)
        index_BS = torch.arange(S).expand(B, S)
        segment_BS, position_BS = index_BS // each, index_BS % each
        answer_BS = position_BS >= int(each * (1 - self.answer))
        rows = compile_rows(valid_BS, segment_BS, position_BS, answer_BS)
        return Batch(tokens_BS, valid_BS, segment_BS, position_BS, answer_BS, rows)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One optimizer step of one variant.

    Attributes:
        name: what tells it from other settings of the variant.
        seconds: median over the measured steps; seconds_low, seconds_high: their quartiles.
        peak_mib: memory that is in use at once at the step's peak, above what was resident before it (target, drafter,
            libraries). Measured as resident memory while the allocator gives every freed block back.
        resident_mib: the same while the allocator keeps freed blocks, as it does in training. What it keeps depends
            on the order of blocks, not on what a step needs, and differs from run to run.
        split: share of the profiled step in target, attention, head and loss, optimizer, and the rest.
    """

    variant: str
    name: str
    settings: dict[str, Any]
    shape: Shape
    seconds: float
    seconds_low: float
    seconds_high: float
    peak_mib: float
    resident_mib: float
    split: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def measure(
    variant: str,
    shape: Shape,
    settings: dict[str, Any] | None = None,
    *,
    steps: int = 5,
    conditions: Conditions | None = None,
    name: str | None = None,
) -> StepCost:
    """Measure in fresh processes on the CPU, so that one variant's memory is not another's.

    Args:
        conditions: None: the default ones.
        name: what the case is called; None: as the variant.
    """
    job = (variant, shape, settings or {}, steps, conditions or Conditions())
    seconds, resident, split = in_fresh_process(_measure_time, job)
    peak = in_fresh_process(_measure_peak, job, return_freed_blocks)
    spread = Spread.of(seconds)
    return StepCost(
        variant, name or variant, job[2], shape, spread.median, spread.low, spread.high, peak, resident, split
    )


def in_fresh_process(work: Callable[..., Any], job: tuple[Any, ...], start: Callable[[], None] | None = None) -> Any:
    """``work(*job)`` in a new process, behind ``start()``.

    Raises:
        ValueError: the process was ended from outside, as the system does when memory runs out.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), start) as pool:
        try:
            return pool.submit(work, *job).result()
        except BrokenProcessPool:
            raise ValueError(
                "a measuring process was killed, most likely for want of memory; use a smaller shape"
            ) from None


def return_freed_blocks() -> None:
    """From now on blocks of 64 KiB and more leave the process when they are freed (with glibc; else as before)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, 64 * 1024)


def _measure_time(*job: Any) -> tuple[list[float], float, dict[str, float]]:
    step, steps = _prepare(*job)
    seconds: list[float] = []
    resident = peak_mib(lambda: seconds.extend(step() for _ in range(steps)))
    return seconds, resident, _split(step)


def _measure_peak(*job: Any) -> float:
    return peak_mib(_prepare(*job)[0])


def _prepare(
    variant: str, shape: Shape, settings: dict[str, Any], steps: int, conditions: Conditions
) -> tuple[Step, int]:
    torch.set_num_threads(conditions.threads)
    module = random_module(variant, shape, settings, conditions, lr=1e-4)
    optimizer, _ = module.optim.build(module.network.named_parameters(), steps)
    _step(module, optimizer, conditions, shape.make_batch(length=32))  # libraries, kernels, optimizer state
    return functools.partial(_step, module, optimizer, conditions, shape.make_batch()), steps


def random_module(
    variant: str, shape: Shape, settings: dict[str, Any], conditions: Conditions, *, lr: float
) -> DraftingModule:
    """The variant on the shape's random target, on its device; every token counts as often in the answers.

    Raises:
        ValueError: a setting that only a whole training gives a meaning to, and what the variant says about the rest.
    """
    if settings.get("eagle_share"):
        raise ValueError(
            f"settings.{variant}.eagle_share={settings['eagle_share']} is a part of a training, and one step is "
            "measured: leave it out, or measure the steps of that part with passes=1 and top_weight=0"
        )
    counts_V, target = torch.ones(shape.vocab_size), shape.target(conditions)
    source = RandomFeatures(target) if conditions.random_features else None
    module = VARIANTS[variant](target, OptimConfig(lr=lr), answer_counts=lambda: counts_V, source=source, **settings)
    return module.to(conditions.device)


def peak_mib(work: Callable[[], object]) -> float:
    """Highest resident memory during ``work`` above what was resident before."""
    before = resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    work()
    return resident_mib("VmHWM") - before


def _step(module: DraftingModule, optimizer: torch.optim.Optimizer, conditions: Conditions, batch: Batch) -> float:
    """The work of ``DraftingModule.training_step`` without a trainer; returns its seconds."""
    began = time.perf_counter()
    with conditions.autocast():
        with torch.profiler.record_function(LABELS["target"]):
            view = View.of(batch, module.target, module.taps, module.source)
        for one in module.passes(view):
            one.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began


def _split(step: Step) -> dict[str, float]:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler writes notices there; this process ends after it
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        total = step() * 1e6
    module: DraftingModule = step.args[0]
    events = profile.key_averages()
    spent = {name: sum(e.cpu_time_total for e in events if e.key.startswith(key)) for name, key in LABELS.items()}
    outer = ("_JointAttention", "_JointAttentionBackward", "aten::scaled_dot_product_attention")
    backward = "ScaledDotProductFlashAttentionForCpuBackward0"
    attention = sum(e.cpu_time_total for e in events if e.key in (*outer, backward))
    in_target = (
        sum(e.cpu_time_total for e in events if e.key == "aten::scaled_dot_product_attention")
        * module.target.num_layers
        / (module.target.num_layers + module.num_passes)
    )
    spent["attention"] = attention - in_target
    spent["rest"] = total - sum(spent.values())
    return {name: microseconds / total for name, microseconds in spent.items()}


def resident_mib(field: str = "VmRSS") -> float:
    """Resident memory of this process: now, or its peak (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise AssertionError(field)


def cost_table(costs: Sequence[StepCost]) -> str:
    """Plain text, one line per measurement."""
    width = max(10, *(len(cost.name) + 1 for cost in costs))
    lines = [
        f"{'variant':<{width}}{'s/step':>8}{'quartiles':>16}{'peak MiB':>10}{'resident':>10}"
        "  target  attn  head+loss  optim  rest"
    ]
    for cost in costs:
        share = cost.split
        lines.append(
            f"{cost.name:<{width}}{cost.seconds:>8.3f}{cost.seconds_low:>8.3f}-{cost.seconds_high:<7.3f}"
            f"{cost.peak_mib:>10.0f}{cost.resident_mib:>10.0f}{share['target']:>8.0%}{share['attention']:>6.0%}"
            f"{share['head_and_loss']:>11.0%}{share['optimizer']:>7.0%}{share['rest']:>6.0%}"
        )
    return "\n".join(lines)
