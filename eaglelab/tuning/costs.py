"""What a round costs on this machine: the target's forward pass by rows, a level of drafting by width.

Times are in seconds, per round of the whole batch. Letters: B batch, R rows.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from eaglelab.decoding import Drafter, DraftSeed, DynamicTree, Engine, FlatTree, Topology
from eaglelab.decoding.state import DecodeState
from eaglelab.decoding.verify import follow
from eaglelab.evaluation.alternation import turns

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget


@dataclass(frozen=True)
class Costs:
    """Medians over the repetitions. On a CPU these are seconds of the main thread, which other jobs do not lengthen.

    verify: target forward, acceptance and its way to the host, by rows per sequence; 1 row is a plain step.
    level: one drafter forward of that many nodes per sequence, with the choice of their children, by nodes.
    root: the choice of the root's children.
    plain, rest: what a plain round, and a round with a tree, takes besides: the drafter's pass over accepted rows,
        pruning, packing, the commit.
    """

    verify: Mapping[int, float]
    level: Mapping[int, float]
    root: float
    plain: float = 0.0
    rest: float = 0.0

    def parts(self, rows: int, forwarded: Sequence[int]) -> float:
        """Drafting and verification of a round with a tree, seconds.

        Args:
            rows: verified, the root included.
            forwarded: nodes that the drafter runs, level by level.
        """
        levels = sum(between(self.level, nodes) for nodes in forwarded)
        return self.root + levels + between(self.verify, rows)

    def round(self, rows: int, forwarded: Sequence[int]) -> float:
        """A round with a tree, seconds."""
        return self.parts(rows, forwarded) + self.rest

    def plain_round(self) -> float:
        """A round without one."""
        return self.verify[1] + self.plain

    def to_dict(self) -> dict[str, Any]:
        return {
            "verify_s": {str(rows): seconds for rows, seconds in self.verify.items()},
            "level_s": {str(nodes): seconds for nodes, seconds in self.level.items()},
            "root_s": self.root,
            "plain_rest_s": self.plain,
            "rest_s": self.rest,
        }


def between(known: Mapping[int, float], wanted: int) -> float:
    """Linear between the nearest known sizes, and beyond the outermost two; a single one counts for all."""
    sizes = sorted(known)
    if wanted in known or len(sizes) == 1:
        return known.get(wanted, known[sizes[0]])
    above = min(max(bisect.bisect_left(sizes, wanted), 1), len(sizes) - 1)
    low, high = sizes[above - 1], sizes[above]
    return known[low] + (known[high] - known[low]) * (wanted - low) / (high - low)


def clock(device: torch.device) -> float:
    """Seconds, for differences: where the device is a CPU, those that this thread worked."""
    if device.type == "cpu":
        return time.thread_time()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def row_grid(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16 ... and `most`: steps of a third to a half."""
    sizes = [1]
    while (after := sizes[-1] + max(1, 2 ** ((sizes[-1]).bit_length() - 2))) < most:
        sizes.append(after)
    return sizes if sizes[-1] == most else [*sizes, most]


def measure_costs(
    target: FrozenTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    widths: Sequence[int],
    rows: Sequence[int],
    repetitions: int = 15,
    on_pass: Callable[[], None] | None = None,
) -> Costs:
    """Time every size once per repetition, in alternating order, behind the given prompts.

    Args:
        prompts: one per sequence of the batch; their length is the context that is paid for.
        widths: nodes of a draft level.
        rows: rows to verify, the root included.
        on_pass: called after every repetition; the first one warms up and is not counted.

    Raises:
        ValueError: what `Engine.start` says about the prompts.
    """
    widest = DynamicTree(max(widths), 2, 2 * max([*rows, 2]))
    bench = _Bench(target, drafter, widest, prompts, max([*rows, 2]))
    jobs: dict[tuple[str, int], Callable[[], None]] = {("verify", size): bench.verify(size) for size in rows}
    jobs |= {("root", 1): bench.grow(1, 1)}
    jobs |= {("level", width): bench.grow(width, 2) for width in widths}
    passes: list[dict[tuple[str, int], float]] = []
    for number, seconds in turns({name: partial(bench.time, job) for name, job in jobs.items()}, repetitions):
        if number:
            passes.append(seconds)
        if on_pass is not None:
            on_pass()
    median = {name: statistics.median(seconds[name] for seconds in passes) for name in jobs}
    root = median["root", 1]
    return Costs(
        verify={size: median["verify", size] for size in rows},
        level={width: max(median["level", width] - root, 0.0) for width in widths},
        root=root,
    )


class _Bench:
    """A batch between two rounds, on which parts of a round run again and again and leave nothing behind."""

    def __init__(
        self, target: FrozenTarget, drafter: Drafter, tree: DynamicTree, prompts: Sequence[Sequence[int]], rows: int
    ) -> None:
        self.target, self.drafter = target, drafter
        self.engine = Engine(target, drafter, tree)
        new = min(rows + 2, target.max_positions - max(map(len, prompts)))
        self.state: DecodeState = self.engine.start(prompts, max_new_tokens=max(new, 1), stop_ids=frozenset())

    def time(self, job: Callable[[], None]) -> float:
        began = clock(self.target.device)
        with torch.inference_mode():
            job()
        return clock(self.target.device) - began

    def verify(self, rows: int) -> Callable[[], None]:
        """Rows that all follow the root: as much work as any tree of that many."""
        state = self.state
        parents_1N = torch.zeros(1, rows - 1, dtype=torch.int64)
        topology = Topology.from_parents(parents_1N, min(rows - 1, 1), chain=rows == 1).to(self.target.device)
        flat = FlatTree(state.frontier_B1.expand(-1, rows), topology)

        def job() -> None:
            output = self.target.forward_rows(
                flat.tokens_BR,
                state.length_B1 + topology.depth_BR,
                state.cache,
                ancestor_BNN=flat.mask_BRR,
                taps=self.drafter.taps if rows > 1 else (),
            )
            follow(output.logits_BNV.argmax(dim=-1), flat).to_host()
            state.cache.discard()

        return job

    def grow(self, width: int, depth: int) -> Callable[[], None]:
        tree, state = DynamicTree(width, depth, depth), self.state
        assert state.seed_B1d is not None
        seed = DraftSeed(state.seed_B1d, state.length_B1 - 1)

        def job() -> None:
            tree.grow(self.drafter, state.draft, seed)
            self.drafter.discard(state.draft)

        return job
