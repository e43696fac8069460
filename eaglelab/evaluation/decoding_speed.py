"""Where the time of decoding goes: plain steps against the library's `generate`, trees against plain steps, batches.

Every figure is a ratio of runs that alternate in one process (`alternation`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from eaglelab.decoding import Drafter, Engine, TreePolicy
from eaglelab.evaluation.alternation import Spread, alternate, ratio
from eaglelab.evaluation.evaluate import generate_ids

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget


class Clock:
    """Seconds spent inside functions, the outermost call counting; waits for a CUDA device on both ends."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._inside = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            if self._inside == 1:
                self._wait()
                began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside -= 1
                if self._inside == 0:
                    self._wait()
                    self.seconds += time.perf_counter() - began

        return timed

    @property
    def running(self) -> bool:
        return self._inside > 0

    @contextmanager
    def on(self, owner: Any, name: str) -> Iterator[None]:
        """Time calls of `owner.name` by way of the instance."""
        own = vars(owner).get(name)
        object.__setattr__(owner, name, self.around(getattr(owner, name)))
        try:
            yield
        finally:
            if own is None:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, own)


@dataclass
class Run:
    """One pass over the prompts. Times in seconds.

    tokens: published in rounds; all_tokens: and those of the prefills.
    decode: rounds alone; whole: and prefills.
    target, drafter: inside their networks and heads, in rounds.
    """

    tokens: int = 0
    all_tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    decode: float = 0.0
    whole: float = 0.0
    target: float = 0.0
    drafter: float = 0.0

    @property
    def tau(self) -> float:
        return 1 + self.accepted / max(self.rounds, 1)

    @property
    def overhead(self) -> float:
        """Share of the rounds outside the networks."""
        return 1 - (self.target + self.drafter) / self.decode


def decode_run(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch: int = 1) -> Run:
    """Decode prompts greedily, `batch` at a time and each group to its end, and look where the time goes.

    Raises:
        ValueError: there was no round to measure, or what `Engine.start` says about the prompts.
    """
    target, drafter, run = engine.target, engine.drafter, Run()
    for first in range(0, len(prompts), batch):
        began = time.perf_counter()
        state = engine.start(prompts[first : first + batch], max_new_tokens=max_new_tokens)
        started = time.perf_counter()
        run.all_tokens += len(state.requests)
        with networks_timed(target, drafter) as (in_target, in_drafter):
            for records in engine.rounds(state):
                for record in records:
                    run.rounds += 1
                    run.tokens += record.published
                    run.accepted += record.accepted
        ended = time.perf_counter()
        run.decode += ended - started
        run.whole += ended - began
        run.target += in_target.seconds
        run.drafter += in_drafter.seconds
    if not run.rounds:
        raise ValueError(
            "every answer ends with its first token, so there is no round to measure: raise max_new_tokens"
        )
    run.all_tokens += run.tokens
    return run


@contextmanager
def networks_timed(target: FrozenTarget, drafter: Drafter | None) -> Iterator[tuple[Clock, Clock]]:
    """Clocks of the target's decoder and head, and of the drafter's network and head."""
    in_target, in_drafter = Clock(target.device), Clock(target.device)
    with ExitStack() as stack:
        if drafter is not None:
            network = getattr(drafter, "network", None)
            if network is not None:
                stack.enter_context(in_drafter.on(network, "forward"))
                stack.enter_context(in_drafter.on(network, "fuse"))
            stack.enter_context(in_drafter.on(drafter, "log_probs"))
        stack.enter_context(in_target.on(target.decoder, "forward"))
        stack.enter_context(_head_timed(target, in_target, in_drafter))
        yield in_target, in_drafter


@contextmanager
def _head_timed(target: FrozenTarget, in_target: Clock, in_drafter: Clock) -> Iterator[None]:
    """The target's head counts as the drafter's where the drafter calls it."""
    head = target.lm_head
    timed = in_target.around(head)
    object.__setattr__(target, "lm_head", lambda hidden: (head if in_drafter.running else timed)(hidden))
    try:
        yield
    finally:
        object.__delattr__(target, "lm_head")


@dataclass
class DecodingSpeed:
    """What was measured; `to_dict()` is what is written.

    runs: by contestant ("generate", "plain", trees by name), one per repetition.
    batches: seconds of the tau evaluation by batch size, one per repetition.
    """

    runs: dict[str, list[Run]]
    trees: dict[str, dict[str, Any]]
    batches: dict[int, list[float]]
    batch_prompts: int
    batch_tree: str
    setting: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        plain = self.runs["plain"]
        return {
            "setting": self.setting,
            "interrupted": self.interrupted,
            "plain": {
                "tokens_per_s": _tokens_per_s(plain).to_dict(),
                "over_generate": _over_generate(plain, self.runs["generate"]).to_dict(),
                "overhead": Spread.of([run.overhead for run in plain]).to_dict(),
            },
            "trees": {
                name: {
                    "tree": tree,
                    "tau": self.runs[name][0].tau,
                    "tokens_per_s": _tokens_per_s(self.runs[name]).to_dict(),
                    "speedup": _speedup(self.runs[name], plain).to_dict(),
                    **{part: spread.to_dict() for part, spread in _split(self.runs[name]).items()},
                }
                for name, tree in self.trees.items()
            },
            "batches": {
                "prompts": self.batch_prompts,
                "tree": self.batch_tree,
                **{
                    f"{size}": {
                        "seconds": Spread.of(seconds).to_dict(),
                        "speedup": ratio(self.batches[1], seconds).to_dict(),
                    }
                    for size, seconds in self.batches.items()
                    if seconds
                },
            },
        }


def measure_decoding(
    target: FrozenTarget,
    drafter: Drafter,
    trees: Mapping[str, TreePolicy],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    repetitions: int = 5,
    batch: int = 16,
    batch_prompts: Sequence[Sequence[int]] = (),
    progress: bool = True,
) -> DecodingSpeed:
    """Decode the same prompts in every way, alternated; greedy.

    Args:
        trees: by name; the first one is also decoded at batch 1 and `batch`, over `batch_prompts`.
        repetitions: runs of each way that count.

    Raises:
        ValueError: no trees, no prompts, fewer than one repetition, or answers of one token.
    """
    if not trees or not prompts or repetitions < 1:
        raise ValueError("measure at least one tree on one prompt in one repetition")
    engines = {"plain": Engine(target)} | {name: Engine(target, drafter, tree) for name, tree in trees.items()}

    def generate() -> Run:
        run, began = Run(), time.perf_counter()
        for prompt in prompts:
            run.all_tokens += len(generate_ids(target, prompt, max_new_tokens, target.eos_token_ids))
        run.whole = time.perf_counter() - began
        return run

    contestants: dict[str, Callable[[], Run]] = {"generate": generate}
    for name, engine in engines.items():
        contestants[name] = lambda engine=engine: decode_run(engine, prompts, max_new_tokens)  # type: ignore[misc]
    runs, interrupted = alternate(contestants, repetitions, progress="decode" if progress else None)
    batches: dict[int, list[float]] = {}
    name = next(iter(trees))
    if batch_prompts and not interrupted:
        both = {
            f"{size}": lambda size=size: _batch_seconds(engines[name], batch_prompts, max_new_tokens, size)
            for size in dict.fromkeys((1, batch))
        }
        seconds, interrupted = alternate(both, repetitions, progress="batches" if progress else None)
        batches = {int(size): found for size, found in seconds.items()}
    return DecodingSpeed(
        runs,
        {name: tree.settings() for name, tree in trees.items()},
        batches,
        len(batch_prompts),
        name,
        setting={
            "target": str(target.source),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "prompts": len(prompts),
            "max_new_tokens": max_new_tokens,
            "repetitions": repetitions,
        },
        interrupted=interrupted,
    )


def speed_table(speed: DecodingSpeed) -> str:
    """The figures as text: medians, quartiles behind them."""
    setting, plain = speed.setting, speed.runs["plain"]
    lines = [
        f"target {setting['target']}, {setting['dtype']}, {setting['device']}, {setting['threads']} threads; "
        f"{setting['prompts']} prompts, {setting['max_new_tokens']} tokens each, {len(plain)} repetitions",
        "",
        f"plain decoding {_tokens_per_s(plain).median:.0f} tokens/s, outside the target "
        f"{Spread.of([run.overhead for run in plain]).median:.1%} of a step",
        f"plain decoding over model.generate {_over_generate(plain, speed.runs['generate']).times()}",
        "",
        f"{'tree':<24}{'tau':>6}{'tokens/s':>10}  {'speed-up over plain':<24}{'target':>8}{'drafter':>9}{'outside':>9}",
        "-" * 90,
    ]
    for name in speed.trees:
        runs, split = speed.runs[name], _split(speed.runs[name])
        lines.append(
            f"{name:<24}{runs[0].tau:>6.2f}{_tokens_per_s(runs).median:>10.0f}  {_speedup(runs, plain).times():<24}"
            f"{split['target'].median:>8.1%}{split['drafter'].median:>9.1%}{split['overhead'].median:>9.1%}"
        )
    for size, seconds in speed.batches.items():
        if size != 1 and seconds:
            lines += [
                "",
                f"tau of {speed.batch_prompts} prompts, {speed.batch_tree}: batch {size} over batch 1 "
                f"{ratio(speed.batches[1], seconds).times()}",
            ]
    return "\n".join(lines)


def _tokens_per_s(runs: Sequence[Run]) -> Spread:
    return Spread.of([run.tokens / run.decode for run in runs])


def _over_generate(plain: Sequence[Run], generate: Sequence[Run]) -> Spread:
    """Tokens per second, prefill included on both sides."""
    return ratio([r.all_tokens / r.whole for r in plain], [r.all_tokens / r.whole for r in generate])


def _speedup(runs: Sequence[Run], plain: Sequence[Run]) -> Spread:
    return ratio([r.tokens / r.decode for r in runs], [r.tokens / r.decode for r in plain])


def _split(runs: Sequence[Run]) -> dict[str, Spread]:
    return {
        "target": Spread.of([run.target / run.decode for run in runs]),
        "drafter": Spread.of([run.drafter / run.decode for run in runs]),
        "overhead": Spread.of([run.overhead for run in runs]),
    }


def _batch_seconds(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch: int) -> float:
    began = time.perf_counter()
    engine.generate(prompts, max_new_tokens=max_new_tokens, batch=batch)
    return time.perf_counter() - began
