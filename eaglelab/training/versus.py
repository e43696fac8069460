"""The shipped training step against the literal one, alternated in one process, and how both grow.

Memory is measured in processes of their own, as in :mod:`eaglelab.training.cost`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eaglelab.evaluation.alternation import Spread, alternate, ratio
from eaglelab.kernels import kernels
from eaglelab.training.cost import (
    Conditions,
    Shape,
    in_fresh_process,
    peak_mib,
    random_module,
    resident_mib,
    return_freed_blocks,
)
from eaglelab.training.literal import literal_loss
from eaglelab.training.work import Work, copy_bytes, matmul_flops, synchronize
from eaglelab.variants import DraftingModule, View

IMPLEMENTATIONS = ("shipped", "literal")
MOST_PASSES = 5
"""Of HASS."""
Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Contest:
    """One optimizer step on given features, the target's own pass apart, in both implementations.

    Attributes:
        name: what tells it from other settings of the variant.
        seconds: of each implementation; ratio: shipped over literal, repetition by repetition.
        peak_mib: memory in use at once at the step's peak, target pass included, above what was resident before.
        flops, bytes: of a step in PyTorch's operations (:class:`~eaglelab.training.work.Work`).
        matmul_flops, copy_bytes: per second, of a plain product in the step's number type and of a plain copy, measured
            between the steps.
    """

    variant: str
    name: str
    settings: Settings
    shape: Shape
    seconds: dict[str, Spread]
    ratio: Spread
    peak_mib: dict[str, float]
    flops: dict[str, int]
    bytes: dict[str, int]
    matmul_flops: float
    copy_bytes: float

    @property
    def peak_ratio(self) -> float:
        return self.peak_mib["shipped"] / self.peak_mib["literal"]

    def utilisation(self, name: str) -> float:
        """Share of the matrix product's rate."""
        return self.flops[name] / self.seconds[name].median / self.matmul_flops

    def traffic(self, name: str) -> float:
        """Share of the copy's rate."""
        return self.bytes[name] / self.seconds[name].median / self.copy_bytes

    def to_dict(self) -> dict[str, Any]:
        derived = {
            "peak_ratio": self.peak_ratio,
            "flop_utilisation": {name: self.utilisation(name) for name in IMPLEMENTATIONS},
            "share_of_copy": {name: self.traffic(name) for name in IMPLEMENTATIONS},
        }
        return dataclasses.asdict(self) | derived


def contest(
    variant: str,
    shape: Shape,
    settings: Settings | None = None,
    *,
    repetitions: int = 5,
    conditions: Conditions | None = None,
    name: str | None = None,
) -> Contest:
    """Measure both implementations of a variant's step, alternated; ``conditions`` None: the default ones."""
    job = (variant, shape, settings or {}, conditions or Conditions())
    seconds, work, rates = in_fresh_process(_measure_seconds, (*job, repetitions))
    memory = {name: in_fresh_process(_measure_memory, (*job, name), return_freed_blocks) for name in IMPLEMENTATIONS}
    return Contest(
        variant,
        name or variant,
        settings or {},
        shape,
        {name: Spread.of(values) for name, values in seconds.items()},
        ratio(seconds["shipped"], seconds["literal"]),
        {name: peak for name, (peak, _) in memory.items()},
        {name: counted[0] for name, counted in work.items()},
        {name: counted[1] for name, counted in work.items()},
        *rates,
    )


def _measure_seconds(
    variant: str, shape: Shape, settings: Settings, conditions: Conditions, repetitions: int
) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]], tuple[float, float]]:
    module, step = _prepare(variant, shape, settings, conditions, IMPLEMENTATIONS)
    view = _view(module, shape, conditions)
    contestants = {name: _timed(step, view, name, conditions) for name in IMPLEMENTATIONS}
    found, _ = alternate(contestants | _rates(conditions), repetitions)
    work = {name: _work(step, view, name) for name in IMPLEMENTATIONS}
    matmul, copy = (statistics.median(found.pop(name)) for name in RATES)
    return found, work, (matmul, copy)


RATES = ("matmul", "copy")


def _rates(conditions: Conditions) -> dict[str, Callable[[], float]]:
    """Of a plain product in the step's number type and a plain copy, per second."""
    device, dtype = conditions.device, conditions.dtype
    return {"matmul": lambda: matmul_flops(device=device, dtype=dtype), "copy": lambda: copy_bytes(device=device)}


def _work(step: Callable[[View, str], None], view: View, name: str) -> tuple[int, int]:
    """Operations and bytes of a step. Kernels do not tell theirs, so PyTorch's operations take their place."""
    with kernels("torch"), Work() as counted:
        step(view, name)
    return counted.flops, counted.bytes


def _view(module: DraftingModule, shape: Shape, conditions: Conditions, length: int | None = None) -> View:
    batch = shape.make_batch(length).to(conditions.device)
    with conditions.autocast():
        return View.of(batch, module.target, module.taps, module.source)


def _timed(step: Callable[[View, str], None], view: View, name: str, conditions: Conditions) -> Callable[[], float]:
    def seconds() -> float:
        synchronize(conditions.device)
        began = time.perf_counter()
        with kernels(conditions.kernels):
            step(view, name)
        synchronize(conditions.device)
        return time.perf_counter() - began

    return seconds


def _measure_memory(
    variant: str, shape: Shape, settings: Settings, conditions: Conditions, name: str
) -> tuple[float, float]:
    """MiB at the step's peak above what was there before, target pass included; and that: weights, optimizer state and,
    on a CPU, libraries."""
    module, step = _prepare(variant, shape, settings, conditions, (name,))

    def work() -> None:
        with kernels(conditions.kernels):
            step(_view(module, shape, conditions), name)

    if conditions.device == "cpu":
        before = resident_mib()
        return peak_mib(work), before
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - allocated) / 2**20, allocated / 2**20


def _prepare(
    variant: str, shape: Shape, settings: Settings, conditions: Conditions, names: Sequence[str] = ("shipped",)
) -> tuple[DraftingModule, Callable[[View, str], None]]:
    torch.set_num_threads(conditions.threads)
    module = random_module(variant, shape, settings, conditions, lr=1e-6)
    optimizer, _ = module.optim.build(module.network.named_parameters(), 1)

    def step(view: View, name: str) -> None:
        with conditions.autocast():
            if name == "literal":
                literal_loss(module, view).backward()
            else:
                for one in module.passes(view):
                    one.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    short = _view(module, shape, conditions, length=32)
    with kernels(conditions.kernels):
        for name in names:  # libraries, kernels, optimizer state
            step(short, name)
    return module, step


# ---- the shipped steps, against each other --------------------------------------------------------------------------

Cases = dict[str, tuple[str, Settings]]
"""Variant and settings by name."""


@dataclasses.dataclass(frozen=True)
class Race:
    """The shipped steps of several cases on given features, alternated in one process.

    Attributes:
        seconds: of each case; cpu_seconds: of the process, which other jobs hardly lengthen.
        ratio, cpu_ratio: each over the first one, repetition by repetition.
        peak_mib, held_mib: memory at the step's peak, above what was there before it; and that: weights, optimizer
            state and, on a CPU, libraries. Each case in a process of its own.
        flops, bytes: of a step in PyTorch's operations (:class:`~eaglelab.training.work.Work`).
        matmul_flops, copy_bytes: per second, of a plain product in the step's number type and of a plain copy, measured
            between the steps.
    """

    shape: Shape
    conditions: Conditions
    seconds: dict[str, Spread]
    cpu_seconds: dict[str, Spread]
    ratio: dict[str, Spread]
    cpu_ratio: dict[str, Spread]
    peak_mib: dict[str, float]
    held_mib: dict[str, float]
    flops: dict[str, int]
    bytes: dict[str, int]
    matmul_flops: float
    copy_bytes: float

    def tokens_per_s(self, name: str) -> float:
        """All tokens of the batch, supervised or not."""
        return self.shape.batch * self.shape.length / self.seconds[name].median

    def utilisation(self, name: str) -> float:
        """Share of the matrix product's rate."""
        return self.flops[name] / self.seconds[name].median / self.matmul_flops

    def traffic(self, name: str) -> float:
        """Share of the copy's rate."""
        return self.bytes[name] / self.seconds[name].median / self.copy_bytes

    def to_dict(self) -> dict[str, Any]:
        derived: dict[str, Callable[[str], float]] = {
            "tokens_per_s": self.tokens_per_s,
            "flop_utilisation": self.utilisation,
            "share_of_copy": self.traffic,
        }
        named = {what: {name: of(name) for name in self.seconds} for what, of in derived.items()}
        return dataclasses.asdict(self) | named


def race(cases: Cases, shape: Shape, *, repetitions: int = 5, conditions: Conditions | None = None) -> Race:
    """Measure the cases' steps; the first one is what the others are compared with.

    Args:
        conditions: None: the default ones.
    """
    conditions = conditions or Conditions()
    found, work, rates = in_fresh_process(_measure_race, (cases, shape, conditions, repetitions))
    memory = {
        name: in_fresh_process(_measure_memory, (variant, shape, settings, conditions, "shipped"), return_freed_blocks)
        for name, (variant, settings) in cases.items()
    }
    wall, cpu = ({name: [times[part] for times in found[name]] for name in cases} for part in (0, 1))
    first = next(iter(cases))
    return Race(
        shape,
        conditions,
        {name: Spread.of(values) for name, values in wall.items()},
        {name: Spread.of(values) for name, values in cpu.items()},
        {name: ratio(values, wall[first]) for name, values in wall.items()},
        {name: ratio(values, cpu[first]) for name, values in cpu.items()},
        {name: peak for name, (peak, _) in memory.items()},
        {name: held for name, (_, held) in memory.items()},
        {name: flops for name, (flops, _) in work.items()},
        {name: moved for name, (_, moved) in work.items()},
        *rates,
    )


def _measure_race(
    cases: Cases, shape: Shape, conditions: Conditions, repetitions: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, tuple[int, int]], tuple[float, float]]:
    contestants: dict[str, Callable[[], tuple[float, float]]] = {}
    count: dict[str, Callable[[], tuple[int, int]]] = {}
    for name, (variant, settings) in cases.items():
        module, step = _prepare(variant, shape, settings, conditions)
        view = _view(module, shape, conditions)
        contestants[name] = functools.partial(_both_times, _timed(step, view, "shipped", conditions))
        count[name] = functools.partial(_work, step, view, "shipped")
    rates = {name: functools.partial(_both_times, rate) for name, rate in _rates(conditions).items()}
    found, _ = alternate(contestants | rates, repetitions)
    matmul, copy = (statistics.median(rate for rate, _ in found.pop(name)) for name in RATES)
    return found, {name: work() for name, work in count.items()}, (matmul, copy)


def _both_times(timed: Callable[[], float]) -> tuple[float, float]:
    began = time.process_time()
    return timed(), time.process_time() - began


def race_table(one: Race) -> str:
    """Plain text: one line per case, and with several of them a second table of how they compare."""
    first, width = next(iter(one.seconds)), max(10, *(len(name) + 1 for name in one.seconds))
    lines = [
        f"{'variant':<{width}}{'s/step':>8}{'quartiles':>16}{'tokens/s':>10}{'GFLOP':>9}{'of matmul':>11}{'of copy':>9}"
        f"{'peak MiB':>10}{'held MiB':>10}"
    ]
    for name, spread in one.seconds.items():
        lines.append(
            f"{name:<{width}}{spread.median:>8.3f}{spread.low:>8.3f}-{spread.high:<7.3f}{one.tokens_per_s(name):>10,.0f}"
            f"{one.flops[name] / 1e9:>9.1f}{one.utilisation(name):>11.0%}{one.traffic(name):>9.0%}"
            f"{one.peak_mib[name]:>10.0f}{one.held_mib[name]:>10.0f}"
        )
    if len(one.seconds) > 1:
        lines += ["", f"{'':<{width}}{f'time over {first}':<26}CPU time over {first}"]
        for name in one.seconds:
            lines.append(f"{name:<{width}}{one.ratio[name].times():<26}{one.cpu_ratio[name].times()}")
    at, features = one.conditions, "random" if one.conditions.random_features else "the target's"
    lines += [
        f"{at.device}, {at.precision}, {features} features, kernels={at.kernels}; matmul "
        f"{one.matmul_flops / 1e9:,.0f} GFLOP/s in {str(at.dtype).removeprefix('torch.')}, copy "
        f"{one.copy_bytes / 1e9:,.1f} GB/s",
        f"alternated in one process, {len(one.seconds[first].values)} repetitions; a step on given features, the "
        "target's own pass apart; peak memory is above what is held before the step",
    ]
    return "\n".join(lines)


# ---- growth ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Growth:
    """Seconds and peak memory of the shipped step while one quantity grows.

    Attributes:
        points: values of the quantity.
        exponent_seconds, exponent_mib: slope of the logarithms over the last three points, where constants weigh least.
    """

    variant: str
    over: str
    points: list[int]
    seconds: list[float]
    peak_mib: list[float]

    @property
    def exponent_seconds(self) -> float:
        return exponent(self.points[-3:], self.seconds[-3:])

    @property
    def exponent_mib(self) -> float:
        return exponent(self.points[-3:], self.peak_mib[-3:])

    def to_dict(self) -> dict[str, Any]:
        slopes = {"exponent_seconds": self.exponent_seconds, "exponent_mib": self.exponent_mib}
        return dataclasses.asdict(self) | slopes


def quantities(variant: str) -> tuple[str, ...]:
    """What a variant's step can be measured over; HASS's ``steps`` are its passes."""
    own = {"hass": ("steps",), "eagle3": ("steps", "draft_vocab_size")}
    return ("length", "vocab_size", *own.get(variant, ()))


def points_for(variant: str, over: str, points: Sequence[int]) -> list[int]:
    """The points that a variant can be measured at.

    Raises:
        ValueError: fewer than three, too few for an exponent.
    """
    most = MOST_PASSES if (variant, over) == ("hass", "steps") else math.inf
    found = [x for x in dict.fromkeys(points) if x <= most]
    if len(found) < 3:
        limit = "" if most == math.inf else f" up to {most}"
        raise ValueError(f"points.{over}={list(points)}: an exponent takes three points{limit} for {variant}")
    return found


def growth(
    variant: str,
    shape: Shape,
    settings: Settings,
    over: str,
    points: Sequence[int],
    *,
    conditions: Conditions | None = None,
) -> Growth:
    """Measure the shipped step at every point.

    Args:
        over: one of :func:`quantities`.
        conditions: None: the default ones.

    Raises:
        ValueError: see :func:`points_for`.
    """
    points = points_for(variant, over, points)
    seconds, peak = [], []
    for point in points:
        at, changed = shape, dict(settings)
        if over in ("length", "vocab_size"):
            at = dataclasses.replace(shape, **{over: point})
        else:
            changed["passes" if (variant, over) == ("hass", "steps") else over] = point
        job = (variant, at, changed, conditions or Conditions())
        seconds.append(in_fresh_process(_shipped_seconds, job))
        peak.append(in_fresh_process(_measure_memory, (*job, "shipped"), return_freed_blocks)[0])
    return Growth(variant, over, points, seconds, peak)


def _shipped_seconds(variant: str, shape: Shape, settings: Settings, conditions: Conditions) -> float:
    module, step = _prepare(variant, shape, settings, conditions)
    timed = _timed(step, _view(module, shape, conditions), "shipped", conditions)
    timed()
    return min(timed() for _ in range(2))


def exponent(points: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log(value) over log(point), least squares."""
    return statistics.linear_regression([math.log(x) for x in points], [math.log(y) for y in values]).slope


# ---- tables ------------------------------------------------------------------------------------------------------


def contest_table(contests: Sequence[Contest]) -> str:
    """Plain text; two lines per variant."""
    width = max(9, *(len(one.name) + 1 for one in contests))
    lines = [
        f"{'variant':<{width}}{'':<9}{'s/step':>8}{'quartiles':>16}{'peak MiB':>10}{'GFLOP':>8}{'of matmul':>11}"
        f"{'of copy':>9}   time and memory, shipped / literal"
    ]
    for one in contests:
        for name in IMPLEMENTATIONS:
            spread = one.seconds[name]
            line = (
                f"{one.name if name == 'shipped' else '':<{width}}{name:<9}{spread.median:>8.3f}"
                f"{spread.low:>8.3f}-{spread.high:<7.3f}{one.peak_mib[name]:>10.0f}{one.flops[name] / 1e9:>8.1f}"
                f"{one.utilisation(name):>11.0%}{one.traffic(name):>9.0%}"
            )
            if name == "shipped":
                line += f"   {one.ratio.median:.2f} ({one.ratio.low:.2f}-{one.ratio.high:.2f})  {one.peak_ratio:.2f}"
            lines.append(line)
    first = contests[0]
    lines.append(
        f"matmul {first.matmul_flops / 1e9:.0f} GFLOP/s, copy {first.copy_bytes / 1e9:.1f} GB/s on "
        f"{torch.get_num_threads()} threads; a step on given features, the target's own pass apart"
    )
    return "\n".join(lines)


def growth_table(curve: Growth) -> str:
    """Plain text, one line per point."""
    lines = [
        f"{curve.variant} over {curve.over}: seconds grow with exponent {curve.exponent_seconds:.2f}, memory with "
        f"{curve.exponent_mib:.2f} (last three points)"
    ]
    for point, seconds, mib in zip(curve.points, curve.seconds, curve.peak_mib, strict=True):
        lines.append(f"{point:>10,}{seconds:>10.3f} s{mib:>10.0f} MiB")
    return "\n".join(lines)
