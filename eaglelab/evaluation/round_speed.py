"""How fast rounds of decoding are where acceptance is given: no trained weights, and tau is what is asked for.

Target and drafter have the shapes of real ones and random weights. The drafter's network and head run as ever; which of
its tokens are accepted is scripted (`eaglelab.evaluation.scripted`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from eaglelab.decoding import Engine, TreePolicy
from eaglelab.drafters import DraftNetwork, FusedDrafter, SlotDrafter
from eaglelab.evaluation.alternation import Spread, alternate, ratio
from eaglelab.evaluation.decoding_speed import networks_timed
from eaglelab.evaluation.scripted import ScriptedDrafter, deepest_script, levels_of, most_children
from eaglelab.target import FrozenTarget
from eaglelab.target.random_llama import LlamaShape
from eaglelab.training.work import copy_bytes, synchronize
from eaglelab.variants import VARIANTS, OptimConfig


def random_target(shape: LlamaShape, *, positions: int, dtype: torch.dtype, device: str) -> FrozenTarget:
    """One whose text does not hang on rounding (`LlamaShape.build_counting`); its weights are drawn on the device."""
    return FrozenTarget(shape.build_counting(positions=positions, dtype=dtype, device=device))


def random_drafter(target: FrozenTarget, variant: str, draft_vocab_size: int | None = None) -> SlotDrafter:
    """A drafter with random weights, in the target's number type and on its device.

    Args:
        draft_vocab_size: of EAGLE-3, whose draft vocabulary is the lowest ids; None: the whole vocabulary.

    Raises:
        ValueError: unknown variant, or a draft vocabulary that it does not have.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} is not one of {', '.join(VARIANTS)}")
    if draft_vocab_size is not None and variant != "eagle3":
        raise ValueError(
            f"draft_vocab_size={draft_vocab_size}: {variant} proposes all of the target's tokens; leave it"
        )
    counts_V = torch.ones(target.vocab_size)
    settings: dict[str, Any] = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    torch.manual_seed(0)
    module = VARIANTS[variant](target, OptimConfig(lr=1e-3), answer_counts=lambda: counts_V, **settings)
    return SlotDrafter(module.network.to(device=target.device, dtype=target.dtype), target, module.taps)


# ---- what a round has to read ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Bytes that go through memory at least, by part.

    Attributes:
        target: its layers, last norm and head, once per verification; of the embedding a few rows, which are left out.
        target_row, draft_row: keys and values of one token.
        drafter: its network, once per forward pass; fusion: what is read for rows of target features only (EAGLE-3).
        draft_head: once per level; EAGLE-1 and HASS read the target's.
    """

    target: int
    target_row: int
    drafter: int = 0
    fusion: int = 0
    draft_head: int = 0
    draft_row: int = 0

    @classmethod
    def of(cls, target: FrozenTarget, drafter: SlotDrafter | None = None) -> Reading:
        embedding = target.model.get_input_embeddings().weight
        layers = sum(_bytes(p) for p in target.decoder.parameters() if p is not embedding)
        verified, row = layers + _bytes(target.head_weight), target.kv_row_bytes
        assert row is not None
        if drafter is None:
            return cls(verified, row)
        network, config = drafter.network, drafter.network.config
        head, fusion = _head(network), _fusion(network)
        whole = sum(_bytes(p) for p in network.parameters())
        return cls(
            verified,
            row,
            drafter=whole - head - fusion,
            fusion=fusion,
            draft_head=head or _bytes(target.head_weight),
            draft_row=2 * config.num_key_value_heads * config.head_dim * target.dtype.itemsize,
        )

    def per_round(self, contexts: Sequence[int], calls: Mapping[str, int]) -> float:
        """On average.

        Args:
            contexts: tokens with keys and values when each round begins.
            calls: of the drafter's ``extend``, ``step`` and ``log_probs`` in all rounds together.
        """
        rounds, context = len(contexts), statistics.fmean(contexts)
        verified = self.target + context * self.target_row
        passes, extended, levels = calls["extend"] + calls["step"], calls["extend"], calls["log_probs"]
        drafted = passes * (self.drafter + context * self.draft_row) + extended * self.fusion + levels * self.draft_head
        return verified + drafted / rounds


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _head(network: DraftNetwork) -> int:
    return sum(_bytes(p) for p in network.head_parameters) if isinstance(network, FusedDrafter) else 0


def _fusion(network: DraftNetwork) -> int:
    if not isinstance(network, FusedDrafter):
        return 0
    parts: list[nn.Module] = [network.fc, *([] if network.fc_norm is None else [network.fc_norm])]
    return sum(_bytes(p) for part in parts for p in part.parameters())


# ---- rounds ------------------------------------------------------------------------------------------------------

NO_CALLS = {"extend": 0, "step": 0, "log_probs": 0}


@dataclass
class RoundRun:
    """Some rounds of one prompt; times in seconds.

    Attributes:
        seconds: of all rounds, the prefill apart.
        accepted: drafted tokens, by round; published: the tokens.
        calls: of the drafter.
        target, drafter: inside their networks and heads, where clocks were on.
    """

    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=lambda: dict(NO_CALLS))
    target: float = 0.0
    drafter: float = 0.0

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def tokens(self) -> int:
        return len(self.published)

    @property
    def rest(self) -> float:
        """Outside of networks and heads."""
        return self.seconds - self.target - self.drafter


def run_rounds(engine: Engine, prompt: Sequence[int], rounds: int, room: int, *, clocks: bool = False) -> RoundRun:
    """Decode a prompt greedily, so many rounds. The device is waited for in front of the rounds and behind them.

    Args:
        room: new tokens that would fit; more than the rounds publish, so that all of them draft.
        clocks: wait for the device around networks and heads, too, to tell their times.
    """
    run, drafter, device = RoundRun(), engine.drafter, engine.target.device
    state = engine.start([prompt], max_new_tokens=room, stop_ids=frozenset())
    before = dict(drafter.calls) if isinstance(drafter, ScriptedDrafter) else NO_CALLS
    with networks_timed(engine.target, drafter) if clocks else nullcontext() as timed:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(rounds):
            (record,) = engine.round(state)
            run.accepted.append(record.accepted)
            run.published += record.published_tokens
        synchronize(device)
        run.seconds = time.perf_counter() - began
    engine.release(state)  # else every run would record its rounds anew
    if timed is not None:
        run.target, run.drafter = (clock.seconds for clock in timed)
    if isinstance(drafter, ScriptedDrafter):
        run.calls = {name: count - before[name] for name, count in drafter.calls.items()}
        if engine.recordings is not None and engine.tree is not None:  # replays are no calls
            levels = levels_of(engine.tree)
            run.calls |= {"step": rounds * (levels - 1), "log_probs": rounds * levels}
    return run


@dataclass
class RoundSpeed:
    """What was measured; `to_dict()` is what is written.

    Attributes:
        setting: the arguments.
        script: accepted tokens, by round; text: the tokens that plain decoding gives.
        prompt_tokens: of the prompt.
        runs: of plain decoding (``plain``) and of each tree, one per repetition, without clocks inside.
        split: the same with clocks; empty where decoding is compiled or recorded.
        reading: what each has to read.
        copy_bytes: per second, of a plain copy, measured in between.
        interrupted: Ctrl-C ended it early; repetitions that were finished count.
    """

    setting: dict[str, Any]
    script: list[int]
    text: list[int]
    prompt_tokens: int
    trees: dict[str, dict[str, Any]]
    runs: dict[str, list[RoundRun]]
    split: dict[str, list[RoundRun]]
    reading: dict[str, Reading]
    copy_bytes: float
    interrupted: bool = False

    @property
    def tau(self) -> float:
        return 1 + statistics.fmean(self.script)

    def seconds_per_round(self, name: str) -> Spread:
        return Spread.of([run.seconds / run.rounds for run in self.runs[name]])

    def tokens_per_s(self, name: str) -> Spread:
        return Spread.of([run.tokens / run.seconds for run in self.runs[name]])

    def speedup(self, name: str) -> Spread:
        """Tokens per second over those of plain decoding, repetition by repetition."""
        rates = [[run.tokens / run.seconds for run in self.runs[one]] for one in (name, "plain")]
        return ratio(rates[0], rates[1])

    def parts(self, name: str) -> dict[str, Spread]:
        """Seconds per round in target, drafter and the rest; empty without clocks."""
        runs = self.split.get(name)
        if not runs:
            return {}
        found = {
            "target": [r.target for r in runs],
            "drafter": [r.drafter for r in runs],
            "rest": [r.rest for r in runs],
        }
        return {part: Spread.of([x / runs[0].rounds for x in seconds]) for part, seconds in found.items()}

    def bytes_per_round(self, name: str) -> float:
        """That have to be read at least, on average."""
        run = self.runs[name][0]
        contexts = [self.prompt_tokens + sum(n + 1 for n in run.accepted[:i]) for i in range(run.rounds)]
        return self.reading[name].per_round(contexts, run.calls)

    def of_roofline(self, name: str) -> float:
        """The copy's time for these bytes over a round's: 1 is as fast as memory allows."""
        return self.bytes_per_round(name) / self.copy_bytes / self.seconds_per_round(name).median

    def same_text(self, name: str) -> bool:
        """Whether every run published what plain decoding does."""
        return all(run.published == self.text[: run.tokens] for run in [*self.runs[name], *self.split.get(name, [])])

    def as_scripted(self, name: str) -> bool:
        """Whether every run accepted what the script says."""
        return all(run.accepted == self.script for run in [*self.runs[name], *self.split.get(name, [])])

    @property
    def exact(self) -> bool:
        """All of it, in all trees."""
        return all(self.same_text(name) for name in self.runs) and all(self.as_scripted(name) for name in self.trees)

    def to_dict(self) -> dict[str, Any]:
        return {
            "setting": self.setting,
            "interrupted": self.interrupted,
            "accepted": self.script,
            "tau": self.tau,
            "copy_bytes_per_s": self.copy_bytes,
            "plain": self._told("plain"),
            "trees": {
                name: {
                    "tree": tree,
                    **self._told(name),
                    "speedup": self.speedup(name).to_dict(),
                    "accepted_as_scripted": self.as_scripted(name),
                }
                for name, tree in self.trees.items()
            },
        }

    def _told(self, name: str) -> dict[str, Any]:
        return {
            "seconds_per_round": self.seconds_per_round(name).to_dict(),
            "rounds_per_s": 1 / self.seconds_per_round(name).median,
            "tokens_per_s": self.tokens_per_s(name).to_dict(),
            "seconds_of_parts": {part: spread.to_dict() for part, spread in self.parts(name).items()},
            "bytes_per_round": self.bytes_per_round(name),
            "share_of_roofline": self.of_roofline(name),
            "drafter_calls": self.runs[name][0].calls,
            "text_of_plain_decoding": self.same_text(name),
        }


def rounds_of(acceptance: Sequence[int], rounds: int) -> list[int]:
    """The script of so many rounds, from its beginning again when it is used up."""
    return [acceptance[i % len(acceptance)] for i in range(rounds)]


def check_script(acceptance: Sequence[int], trees: Mapping[str, TreePolicy], draft_vocab_size: int) -> None:
    """What can be said before weights are made.

    Raises:
        ValueError: an empty script, negative numbers, no trees, or a tree that the script does not fit.
    """
    if not acceptance:
        raise ValueError("acceptance=[]: name the tokens that are accepted in each round, such as acceptance=[3,0,5,2]")
    if wrong := [n for n in acceptance if type(n) is not int or n < 0]:
        raise ValueError(
            f"acceptance={list(acceptance)}: {wrong[0]!r} is no number of tokens; give whole numbers from 0 on"
        )
    if not trees:
        raise ValueError("trees=[]: measure at least one")
    for name, tree in trees.items():
        if max(acceptance) > (deepest := deepest_script(tree)):
            raise ValueError(
                f"acceptance={list(acceptance)}: {max(acceptance)} tokens cannot be accepted of tree {name}, whose "
                f"path of most likely children has {deepest}; give a deeper tree, or smaller numbers"
            )
        if most_children(tree) >= draft_vocab_size:
            raise ValueError(
                f"tree {name} takes {most_children(tree)} children of a node, and the draft vocabulary has "
                f"{draft_vocab_size} tokens: no wrong one would be left to propose; use a narrower tree"
            )


def room_for(acceptance: Sequence[int], rounds: int, trees: Mapping[str, TreePolicy]) -> int:
    """New tokens that must fit so that every round drafts: those of all rounds, the first one, and a tree's depth."""
    return 2 + sum(n + 1 for n in rounds_of(acceptance, rounds)) + max(tree.max_depth for tree in trees.values())


def measure_rounds(
    target: FrozenTarget,
    drafter: SlotDrafter,
    trees: Mapping[str, TreePolicy],
    prompt: Sequence[int],
    acceptance: Sequence[int],
    *,
    rounds: int,
    repetitions: int = 5,
    compile: bool = False,
    graphs: bool = False,
    progress: bool = True,
) -> RoundSpeed:
    """Decode as many tokens plainly and with every tree, alternated; then once more with clocks inside.

    Args:
        trees: by name.
        acceptance: drafted tokens that are accepted, round by round, from the beginning again when they are used up.
        rounds: of each tree; plain decoding takes one for each of their tokens.
        compile, graphs: as in `Engine`. There are no clocks inside then: such a pass cannot be divided.

    Raises:
        ValueError: rounds or repetitions below 1, what `check_script` says, or what the engine says about the prompt.
    """
    if rounds < 1 or repetitions < 1:
        raise ValueError(f"rounds={rounds}, repetitions={repetitions}: give at least 1")
    config = drafter.network.config
    check_script(acceptance, trees, config.draft_vocab_size or config.vocab_size)
    script, room = rounds_of(acceptance, rounds), room_for(acceptance, rounds, trees)
    plain = Engine(target, compile=compile, graphs=graphs)
    whole = plain.generate_one(prompt, max_new_tokens=room, stop_ids=frozenset()).tokens
    text, tokens = whole[1:], sum(n + 1 for n in script)  # the prefill publishes the first
    engines, counts = {"plain": plain}, {"plain": tokens}
    for name, tree in trees.items():
        scripted = ScriptedDrafter(drafter, [*prompt, *whole], script)
        engines[name], counts[name] = Engine(target, scripted, tree, compile=compile, graphs=graphs), rounds

    def contestants(clocks: bool) -> dict[str, Callable[[], RoundRun]]:
        return {
            name: lambda name=name, engine=engine: run_rounds(engine, prompt, counts[name], room, clocks=clocks)  # type: ignore[misc]
            for name, engine in engines.items()
        }

    rates: list[float] = []

    def copy() -> RoundRun:
        rates.append(copy_bytes(device=str(target.device)))
        return RoundRun()

    runs, interrupted = alternate(
        contestants(False) | {"copy": copy}, repetitions, progress="rounds" if progress else None
    )
    runs.pop("copy")
    split: dict[str, list[RoundRun]] = {}
    if not (compile or graphs or interrupted):
        split, interrupted = alternate(contestants(True), repetitions, progress="clocks" if progress else None)
    reading = {"plain": Reading.of(target)} | dict.fromkeys(trees, Reading.of(target, drafter))
    setting = {
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "prompt_tokens": len(prompt),
        "rounds": rounds,
        "acceptance": list(acceptance),
        "repetitions": repetitions,
        "compile": compile,
        "graphs": graphs,
    }
    settings = {name: tree.settings() for name, tree in trees.items()}
    copied = statistics.median(rates) if rates else 0.0
    return RoundSpeed(setting, script, text, len(prompt), settings, runs, split, reading, copied, interrupted)


def rounds_table(speed: RoundSpeed) -> str:
    """The figures as text: medians, quartiles behind the speed-up."""
    setting, width = speed.setting, max(24, *(len(name) + 2 for name in speed.trees))
    head = (
        f"{'':<{width}}{'tau':>6}{'rounds/s':>10}{'tokens/s':>10}{'ms/round':>10}{'target':>9}{'drafter':>9}"
        f"{'rest us':>9}{'MB/round':>10}{'of roofline':>13}   speed-up over plain"
    )
    accepted = ",".join(map(str, setting["acceptance"]))
    lines = [
        f"{setting['device']}, {setting['dtype']}; prompt of {setting['prompt_tokens']} tokens, {setting['rounds']} "
        f"rounds, {accepted} tokens accepted in turn; {len(speed.runs['plain'])} repetitions"
        f"{', compiled' if setting['compile'] else ''}{', as CUDA graphs' if setting['graphs'] else ''}",
        head,
        "-" * len(head),
    ]
    for name in speed.runs:
        seconds, parts = speed.seconds_per_round(name).median, speed.parts(name)
        split = [f"{1e3 * parts[part].median:.2f}" if parts else "" for part in ("target", "drafter")]
        rest = f"{1e6 * parts['rest'].median:.0f}" if parts else ""
        lines.append(
            f"{name:<{width}}{1 if name == 'plain' else speed.tau:>6.2f}{1 / seconds:>10.1f}"
            f"{speed.tokens_per_s(name).median:>10.1f}{1e3 * seconds:>10.2f}{split[0]:>9}{split[1]:>9}{rest:>9}"
            f"{speed.bytes_per_round(name) / 1e6:>10.1f}{speed.of_roofline(name):>13.0%}"
            f"   {speed.speedup(name).times() if name != 'plain' else ''}".rstrip()
        )
    clocks = "; target, drafter (ms) and rest (us) are of runs with clocks inside" if speed.split else ""
    wrong = [name for name in speed.runs if not speed.same_text(name)]
    unlike = [name for name in speed.trees if not speed.as_scripted(name)]
    lines += [
        f"copy {speed.copy_bytes / 1e9:,.1f} GB/s{clocks}",
        f"text: {'not' if wrong else 'in all runs'} that of plain decoding{_in(wrong)}",
        f"accepted: {'not' if unlike else 'in all runs'} as scripted{_in(unlike)}",
    ]
    return "\n".join(lines)


def _in(names: Sequence[str]) -> str:
    return f" in {', '.join(names)}" if names else ""
