"""python experiments/soak/decoding.py RUN [RUN ...] --minutes 30

Decode mixed requests without end, with faults thrown into drafter and target, and look for what only time shows: memory
that grows, answers that differ from plain decoding, records that do not add up. Writes decoding.json.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from eaglelab.assets import bundled_data
from eaglelab.decoding import Chain, DynamicTree, Engine, Sampling, StaticTree
from eaglelab.decoding.policies import SampledTree
from eaglelab.decoding.sampling import Stream
from eaglelab.evaluation import load_prompts
from eaglelab.evaluation.chats import chat_encoder
from eaglelab.training import RunFolder

TREES = {
    "chain": Chain(5),
    "static": StaticTree(),
    "dynamic": DynamicTree(width=4, depth=6, budget=16),
    "dynamic, large": DynamicTree(width=10, depth=6, budget=59),
    "sampled": SampledTree([3, 2, 1]),
    "none": None,
}
HERE = Path(__file__).parent
EDGE = 5e-6
"""Of cumulated probability: what fp32 leaves uncertain between two batches."""


class InjectedError(RuntimeError):
    """What is thrown in."""


@dataclass
class Faults:
    """Throws an `InjectedError`, or now and then a KeyboardInterrupt, into a share of the calls."""

    dice: random.Random
    share: float = 0.0
    thrown: Counter = field(default_factory=Counter)

    def wrap(self, holder: Any, name: str) -> None:
        """Let a method fail sometimes, before its work or after it."""
        real = getattr(holder, name)

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            early = self.dice.random() < self.share
            late = self.dice.random() < self.share
            if early:
                self._throw(name)
            result = real(*args, **kwargs)
            if late:
                self._throw(name)
            return result

        setattr(holder, name, sometimes)

    def _throw(self, name: str) -> None:
        self.thrown[name] += 1
        raise KeyboardInterrupt if self.dice.random() < 0.2 else InjectedError(name)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        share, self.share = self.share, 0.0
        try:
            yield
        finally:
            self.share = share


@dataclass
class Soak:
    """One target, its drafters, and what was seen so far."""

    runs: list[Path]
    seed: int

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.faults = Faults(random.Random(self.seed + 1))
        folders = [RunFolder.existing(run) for run in self.runs]
        self.target = folders[0].load_target()
        self.drafters = {folder.manifest().variant: folder.load_drafter(self.target) for folder in folders}
        for drafter in self.drafters.values():
            for name in ("extend", "step", "log_probs"):
                self.faults.wrap(drafter, name)
        self.faults.wrap(self.target, "forward_rows")
        encode = chat_encoder(self.target)
        self.prompts = [list(encode(list(one.messages[:1]))) for one in load_prompts(bundled_data("eval"), limit=60)]
        self.seen: Counter = Counter()
        self.problems: list[str] = []
        self.plain = Engine(self.target)

    def lap(self) -> None:
        """A batch of requests under one setting, drawn at random."""
        dice = self.dice
        tree = dice.choice(list(TREES))
        variant = dice.choice(list(self.drafters))
        temperature = dice.choice([0.0, 0.7, 1.0])
        room = dice.randint(1, 16)
        chosen = [dice.randrange(len(self.prompts)) for _ in range(room + dice.randint(0, 6))]
        prompts = [self.prompts[number] for number in chosen]
        sampling = [Sampling(temperature=temperature, seed=dice.randrange(2**31)) for _ in prompts]
        length = dice.randint(1, 40)
        stops = set(self.target.eos_token_ids) | set(
            dice.sample(range(self.target.vocab_size), dice.choice([0, 0, 40]))
        )
        records = dice.random() < 0.5
        engine = (
            self.plain
            if TREES[tree] is None
            else Engine(self.target, self.drafters[variant], TREES[tree], record_nodes=records)
        )
        setting = f"{variant}, {tree}, T={temperature}, batch {room}, {len(prompts)} prompts, {length} tokens"
        asked = {"max_new_tokens": length, "stop_ids": stops, "sampling": sampling}
        with self.faults.off():
            expected = [one.tokens for one in self.plain.generate(prompts, batch=16, **asked)]
        exact = tree != "sampled" or temperature == 0
        self.faults.share = dice.choice([0.0, 0.003, 0.02])
        if dice.random() < 0.5:
            answers = self._whole(engine, prompts, room, asked, setting)
        else:
            prompts, expected = prompts[:room], expected[:room]
            answers = self._by_rounds(engine, prompts, asked | {"sampling": sampling[:room]}, setting)
        self.faults.share = 0.0
        for number, (tokens, complete) in answers.items():
            wanted = expected[number]
            self.seen["answers"] += 1
            self.seen["tokens"] += len(tokens)
            self.seen[f"tree {tree}"] += 1
            self.seen[f"T {temperature}"] += 1
            if exact:
                self.seen["compared"] += 1
                wanted = wanted if complete else wanted[: len(tokens)]
                if tokens != wanted and self._by_rounding(prompts[number], tokens, wanted, sampling[number]):
                    self.seen["differ by rounding"] += 1
                elif tokens != wanted:
                    self._problem(f"{setting}: answer {number} is {tokens}, plain decoding gives {wanted}")
            elif complete and not (len(tokens) == length or tokens[-1] in stops):
                self._problem(f"{setting}: answer {number} ends by no rule")

    def _by_rounding(self, prompt: list[int], tokens: list[int], wanted: list[int], sampling: Sampling) -> bool:
        """Whether the first difference is one that another order of additions makes: two tokens of equal score, or a
        drawn number on the edge between two tokens. The rest of the text follows from it."""
        place = next((k for k, (one, other) in enumerate(zip(tokens, wanted, strict=False)) if one != other), None)
        if place is None:
            return False
        with torch.inference_mode():
            logits_V = self.target.model(torch.tensor([prompt + tokens[:place]])).logits[0, -1].double()
        pair = [tokens[place], wanted[place]]
        if sampling.greedy:
            return float(logits_V.max() - logits_V[pair].min()) < 1e-4
        above_V = (logits_V / sampling.temperature).softmax(-1).cumsum(-1)
        below_V = torch.nn.functional.pad(above_V[:-1], (1, 0))
        drawn = float(Stream(sampling.seed).at(place, 1)[0])
        return all(float(below_V[one]) - EDGE <= drawn <= float(above_V[one]) + EDGE for one in pair)

    def _whole(self, engine, prompts, room, asked, setting) -> dict[int, tuple[list[int], bool]]:
        """`generate`, again from the start after a fault; requests join and leave."""
        for attempt in range(4):
            heard: list = []
            try:
                with self.faults.off() if attempt == 3 else contextlib.nullcontext():
                    results = engine.generate(prompts, batch=room, on_round=heard.extend, **asked)
            except (InjectedError, KeyboardInterrupt):
                self.seen["abandoned generations"] += 1
                continue
            for number, result in enumerate(results):
                told = [record for record in heard if record.request == number]
                if told != result.rounds:
                    self._problem(f"{setting}: records heard and kept differ")
                self._check_records(result.rounds, result.tokens, engine, setting)
            return {number: (result.tokens, True) for number, result in enumerate(results)}
        raise AssertionError("the last attempt has no faults")

    def _by_rounds(self, engine, prompts, asked, setting) -> dict[int, tuple[list[int], bool]]:
        """Rounds one by one: a fault is followed by the next round of the same state, and requests are cancelled."""
        with self.faults.off():
            state = engine.start(prompts, **asked)
        answers: dict[int, tuple[list[int], bool]] = {}
        rounds: dict[int, list] = {number: [] for number in range(len(prompts))}
        cancelled: set[int] = set()
        requests = {request.number: request for request in state.requests}
        while any(state.running):
            running = [request for request in state.requests if request.stop_reason is None]
            if len(running) > 1 and self.dice.random() < 0.1:
                victim = self.dice.choice(running)
                victim.stop_reason = "cancelled"
                cancelled.add(victim.number)
                self.seen["cancelled"] += 1
            before = {number: list(request.tokens) for number, request in requests.items()}
            try:
                state.retire(engine.drafter)
                records = engine.round(state)
            except (InjectedError, KeyboardInterrupt):
                self.seen["failed rounds"] += 1
                if before != {number: list(request.tokens) for number, request in requests.items()}:
                    self._problem(f"{setting}: a failed round published tokens")
                continue
            self.seen["rounds"] += 1
            for record in records:
                rounds[record.request].append(record)
        for number, request in requests.items():
            answers[number] = (request.new_tokens, number not in cancelled)
            self._check_records(rounds[number], request.new_tokens, engine, setting)
        return answers

    def _check_records(self, records, tokens, engine, setting) -> None:
        """Every token but the first is told once, and no record claims what its tree could not hold."""
        most = 0 if engine.tree is None else engine.tree.max_nodes
        told = [token for record in records for token in record.published_tokens]
        right = told == tokens[1:] and [r.round for r in records] == sorted({r.round for r in records})
        for record in records:
            right &= 0 <= record.accepted <= record.reached + 1 and record.accepted <= record.drafted <= most
            right &= record.published == len(record.published_tokens) in (record.accepted, record.accepted + 1)
            right &= record.verified == record.drafted + 1
            right &= min(record.draft_s, record.pack_s, record.verify_s, record.commit_s) >= 0
            if record.nodes is not None:
                right &= len(record.nodes.token) == record.drafted and sum(record.nodes.accepted) >= record.accepted
        self.seen["records"] += len(records)
        if not right:
            self._problem(f"{setting}: records do not add up: {records}")

    def _problem(self, text: str) -> None:
        self.problems.append(text[:2000])
        print(f"PROBLEM {text[:2000]}", flush=True)


def resident_mib() -> float:
    """Memory of the process, after what is free was given back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


def live_tensors() -> int:
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def soak(runs: list[Path], minutes: float, seed: int = 0) -> dict[str, Any]:
    """Run laps for so long.

    Returns:
        counts, problems, and memory after every lap: its medians over the first and the last quarter of the time after
        the warm-up, which is the first fifth.
    """
    one = Soak(runs, seed)
    began = time.monotonic()
    memory: list[tuple[float, float, int]] = []
    while (now := time.monotonic() - began) < minutes * 60:
        one.lap()
        one.seen["laps"] += 1
        memory.append((round(now, 1), round(resident_mib(), 1), live_tensors()))
        if one.seen["laps"] % 20 == 0:
            print(
                f"{now / 60:5.1f} min  {memory[-1][1]:.0f} MiB  {memory[-1][2]} tensors  {dict(one.seen)}", flush=True
            )
    settled = memory[len(memory) // 5 :]
    quarter = max(1, len(settled) // 4)
    first, last = settled[:quarter], settled[-quarter:]
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "seen": dict(sorted(one.seen.items())),
        "faults": dict(one.faults.thrown),
        "problems": one.problems,
        "resident_mib": [median(mib for _, mib, _ in part) for part in (first, last)],
        "live_tensors": [median(count for _, _, count in part) for part in (first, last)],
        "growth": median(mib for _, mib, _ in last) / median(mib for _, mib, _ in first) - 1,
        "memory": memory,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of one target")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "decoding.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = soak(arguments.runs, arguments.minutes, arguments.seed)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in figures.items() if name != "memory"}, indent=1))
    raise SystemExit(bool(figures["problems"]) or figures["growth"] > 0.02)
