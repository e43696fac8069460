"""Record, time, choose, measure: the whole of ``eaglelab tune``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from eaglelab.decoding import Drafter, DynamicTree, Engine, TreePolicy
from eaglelab.evaluation.alternation import Spread, alternate, ratio
from eaglelab.evaluation.decoding_speed import Run, decode_run
from eaglelab.tuning.choice import Grid, Prediction, Shape, choose, predict
from eaglelab.tuning.costs import Costs, clock, measure_costs, row_grid
from eaglelab.tuning.recording import record
from eaglelab.tuning.replay import Replay

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget

SHOWN = 6
"""Predictions in the table."""
CALIBRATION = DynamicTree(width=3, depth=4, budget=12)
"""The tree whose real rounds tell what a round takes beside drafting and verification."""


@dataclass
class Tuning:
    """What was found; `to_dict()` is what is written.

    predictions: the fastest first.
    default: the prediction for the tree to beat; None where no replay predicts it (static and sampled trees).
    measured: runs of "plain", "default" and "best" on other prompts, one per repetition; no "best" where it is the
        default.
    """

    costs: Costs
    predictions: list[Prediction]
    default_tree: TreePolicy
    default: Prediction | None
    places: int
    answers: int
    measured: dict[str, list[Run]] = field(default_factory=dict)
    setting: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def best(self) -> Prediction:
        return self.predictions[0]

    def speedup(self, name: str, over: str = "plain") -> Spread | None:
        """Measured tokens per second of one way of decoding over another; None where it was not measured."""
        if not self.measured.get(name):
            return None
        return ratio(
            [r.tokens / r.decode for r in self.measured[name]], [r.tokens / r.decode for r in self.measured[over]]
        )

    def to_dict(self) -> dict[str, Any]:
        measured = {}
        for name, runs in self.measured.items():
            if (over_plain := self.speedup(name)) is not None:
                measured[name] = {
                    "tau": runs[0].tau,
                    "tokens_per_s": Spread.of([run.tokens / run.decode for run in runs]).to_dict(),
                    "speedup": over_plain.to_dict(),
                }
        over_default = self.speedup("best", "default")
        return {
            "setting": self.setting,
            "interrupted": self.interrupted,
            "overrides": self.best.shape.overrides,
            "costs": self.costs.to_dict(),
            "recorded": {"answers": self.answers, "places": self.places},
            "default": {
                "tree": self.default_tree.settings(),
                "predicted": None if self.default is None else self.default.to_dict(),
            },
            "best": self.best.to_dict(),
            "measured": measured,
            "best_over_default": None if over_default is None else over_default.to_dict(),
            "predictions": [one.to_dict() for one in self.predictions],
        }


def tune(
    target: FrozenTarget,
    drafter: Drafter,
    default: TreePolicy,
    prompts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    grid: Grid,
    *,
    max_new_tokens: int,
    batch: int = 1,
    repetitions: int = 5,
    progress: bool = True,
) -> Tuning:
    """Name the tree that is fastest on this machine, and measure it against `default`.

    Args:
        prompts: to record drafts on.
        others: to measure on; alternated, greedy.
        grid: trees to choose from. Above batch 1 without floors: there a floor depends on the neighbours.
        batch: sequences that are decoded together.
        repetitions: of the measurement.

    Returns:
        What was found. An interrupt (Ctrl-C) during the measurement sets `interrupted`; before, it is raised.

    Raises:
        ValueError: a setting out of range, or prompts that leave no room for drafting.
    """
    if repetitions < 1 or batch < 1:
        raise ValueError(f"repetitions={repetitions}, batch={batch}: both must be at least 1")
    if len(others) < batch:
        raise ValueError(f"{len(others)} prompts to measure on, and batch={batch}: give at least as many")
    if batch > 1:
        grid = Grid(grid.widths, grid.depth, grid.budgets, (0.0,))
    known = Shape.of(default)
    widths = sorted({*grid.widths, *([known.width] if known else [])})
    depth = max([grid.depth, *([known.depth] if known else [])])
    _check_vocabulary(drafter, target, widths)

    with tqdm(total=len(prompts), desc="record", unit="answer", disable=not progress) as bar:
        recordings = record(
            target, drafter, prompts, widths=widths, depth=depth, max_new_tokens=max_new_tokens, on_answer=bar.update
        )
    replay = Replay(recordings)
    # the context that a round has on average
    halfway = [[*prompt, *one.tokens[: len(one.tokens) // 2]] for prompt, one in zip(prompts, recordings, strict=True)]
    contexts = [halfway[number % len(halfway)] for number in range(batch)]
    costs = _costs(target, drafter, contexts, widths, max([*grid.budgets, known.budget if known else 1]) + 1, progress)
    found = Tuning(
        costs,
        choose(replay, costs, grid, batch),
        default,
        None if known is None else predict(replay, costs, known, batch),
        replay.places,
        len(recordings),
        setting={
            "target": str(target.source),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "batch": batch,
            "max_new_tokens": max_new_tokens,
            "repetitions": repetitions,
            "measured_prompts": len(others),
            "context": round(statistics.mean(map(len, contexts))),
        },
    )
    engines = {"plain": Engine(target), "default": Engine(target, drafter, default)}
    if found.best.shape != known:
        engines["best"] = Engine(target, drafter, found.best.shape.policy())
    contestants: dict[str, Callable[[], Run]] = {
        name: lambda engine=engine: decode_run(engine, others, max_new_tokens, batch)  # type: ignore[misc]
        for name, engine in engines.items()
    }
    found.measured, found.interrupted = alternate(contestants, repetitions, progress="measure" if progress else None)
    return found


def _check_vocabulary(drafter: Drafter, target: FrozenTarget, widths: Sequence[int]) -> None:
    size = drafter.log_probs(torch.zeros(1, target.hidden_size, dtype=target.dtype, device=target.device)).shape[-1]
    if max(widths) > size:
        raise ValueError(f"widths={list(widths)}: the draft vocabulary has {size} tokens; no node has more children")


def _costs(
    target: FrozenTarget,
    drafter: Drafter,
    contexts: Sequence[Sequence[int]],
    widths: Sequence[int],
    most_rows: int,
    progress: bool,
) -> Costs:
    repetitions = 15
    with tqdm(total=repetitions + 1, desc="time", unit="pass", disable=not progress) as bar:
        costs = measure_costs(
            target,
            drafter,
            contexts,
            widths=widths,
            rows=row_grid(max(most_rows, 2)),
            repetitions=repetitions,
            on_pass=bar.update,
        )
    plain = statistics.median(_round_seconds(Engine(target), contexts)) - costs.verify[1]
    forwarded = [CALIBRATION.width] * (CALIBRATION.max_depth - 1)
    parts = costs.parts(CALIBRATION.max_nodes + 1, forwarded)
    rest = statistics.median(_round_seconds(Engine(target, drafter, CALIBRATION), contexts)) - parts
    return Costs(costs.verify, costs.level, costs.root, max(plain, 0.0), max(rest, 0.0))


def _round_seconds(engine: Engine, contexts: Sequence[Sequence[int]], rounds: int = 12) -> list[float]:
    """Of whole rounds of the batch, the first two left out."""
    room = min(engine.target.max_positions - max(map(len, contexts)), 6 * rounds)
    state = engine.start(contexts, max_new_tokens=max(room, 1), stop_ids=frozenset())
    seconds = []
    for _ in range(rounds):
        if not all(state.running):
            break
        began = clock(engine.target.device)
        engine.round(state)
        seconds.append(clock(engine.target.device) - began)
    return seconds[2:] or seconds or [0.0]


def tuning_table(tuning: Tuning) -> str:
    """Costs, the fastest trees as predicted, and what was measured, as text."""
    setting, costs = tuning.setting, tuning.costs
    rest = 1e3 * (costs.root + costs.rest)
    lines = [
        f"target {setting['target']}, {setting['dtype']}, {setting['device']}, {setting['threads']} threads, "
        f"batch {setting['batch']}, {setting['context']} tokens of context",
        "",
        _sizes("rows verified", costs.verify),
        _times("ms", costs.verify),
        _sizes("nodes of a draft level", costs.level),
        _times("ms", costs.level),
        f"{'the rest of a round':<24}{rest:.2f} ms with a tree, {1e3 * costs.plain:.2f} ms without",
        "",
        f"{len(tuning.predictions)} trees replayed at {tuning.places:,} places of {tuning.answers} answers",
        f"{'predicted':<32}{'tau':>6}{'rows':>7}{'levels':>8}{'tokens/s':>10}{'speed-up':>10}",
        "-" * 73,
    ]
    shown = tuning.predictions[:SHOWN]
    if tuning.default is not None and tuning.default.shape not in [one.shape for one in shown]:
        shown = [*shown, tuning.default]
    for one in shown:
        name = f"{one.shape}{' (default)' if tuning.default and one.shape == tuning.default.shape else ''}"
        lines.append(
            f"{name:<32}{one.tau:>6.2f}{one.rows:>7.1f}{one.levels:>8.1f}{one.tokens_per_s:>10.0f}{one.speedup:>9.2f}x"
        )
    lines += _measured_lines(tuning)
    return "\n".join([*lines, "", f"use: {tuning.best.shape.overrides}"])


def _measured_lines(tuning: Tuning) -> list[str]:
    plain = tuning.measured.get("plain")
    if not plain:
        return ["", "nothing was measured"]
    lines = [
        "",
        f"measured, alternated, {tuning.setting['measured_prompts']} other prompts, {len(plain)} repetitions",
        f"{'':<32}{'tau':>6}{'predicted':>11}{'tokens/s':>10}  {'speed-up (quartiles)':<24}{'predicted':>9}",
        "-" * 94,
    ]
    for name, predicted in (("default", tuning.default), ("best", tuning.best)):
        speedup = tuning.speedup(name)
        if speedup is None:
            continue
        runs = tuning.measured[name]
        title = f"{name}: {predicted.shape if predicted else tuning.default_tree.name}"
        tau, times = (f"{predicted.tau:.2f}", f"{predicted.speedup:.2f}x") if predicted else ("-", "-")
        speed = statistics.median(run.tokens / run.decode for run in runs)
        spread = speedup.times()
        lines.append(f"{title:<32}{runs[0].tau:>6.2f}{tau:>11}{speed:>10.0f}  {spread:<24}{times:>9}")
    if (over := tuning.speedup("best", "default")) is not None:
        lines.append(f"best over default {over.times()}")
    else:
        lines.append("the default is the best")
    return lines


def _sizes(name: str, known: Any) -> str:
    return f"{name:<24}" + "".join(f"{size:>7}" for size in known)


def _times(name: str, known: Any) -> str:
    return f"{name:<24}" + "".join(f"{1e3 * seconds:>7.2f}" for seconds in known.values())
