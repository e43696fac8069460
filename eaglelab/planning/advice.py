"""What would make a training fit, each way with its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from eaglelab.planning.setting import Setting
from eaglelab.training.activations import WIDE
from eaglelab.training.flops import Load
from eaglelab.training.memory import Placement

USABLE = 0.92
"""Of a device's memory: the rest is for the runtime's own context and for holes between blocks."""
DRAFT_VOCABULARY = 32_000


@dataclasses.dataclass(frozen=True)
class Way:
    """A change of settings and the memory that a device then needs, in bytes."""

    change: str
    peak: int


def ways_to_fit(setting: Setting, room: int, row_length: int) -> list[Way]:
    """Changes after which the peak is at most ``room`` bytes.

    Those that suffice alone, with the mildest value that does; where none does, pairs of them; else all that help, one
    on top of the other, until it fits. Empty: nothing known helps.
    """
    alone = [way for candidates in _candidates(setting, row_length) if (way := _first(candidates, room)) is not None]
    if alone:
        return [way for way, _ in alone]
    return _pairs(setting, room, row_length) or _together(setting, room, row_length)


def _first(candidates: list[tuple[str, Setting]], room: int) -> tuple[Way, Setting] | None:
    for change, changed in candidates:
        if (peak := changed.memory().peak) <= room:
            return Way(change, peak), changed
    return None


def _pairs(setting: Setting, room: int, row_length: int) -> list[Way]:
    """Changes of two kinds that suffice together, the mildest of each pair of kinds."""
    found: dict[tuple[int, int], Way] = {}
    for first, candidates in enumerate(_candidates(setting, row_length)):
        for change, changed in candidates:
            for second, others in enumerate(_candidates(changed, row_length)):
                if second > first and (first, second) not in found and (fit := _first(others, room)) is not None:
                    found[first, second] = Way(f"{change} {fit[0].change}", fit[0].peak)
    return list(found.values())


def _together(setting: Setting, room: int, row_length: int) -> list[Way]:
    taken: list[str] = []
    for place in range(len(list(_candidates(setting, row_length)))):
        candidates = list(_candidates(setting, row_length))[place]
        found = _first(candidates, room)
        if found is not None:
            return [Way(" ".join([*taken, found[0].change]), found[0].peak)]
        if candidates and candidates[-1][1].memory().peak < setting.memory().peak:
            change, setting = candidates[-1]
            taken.append(change)
    return []


def _candidates(setting: Setting, row_length: int) -> Iterator[list[tuple[str, Setting]]]:
    """Kinds of change, the harmless ones first; within a kind the mildest first. Empty where one does not apply."""
    numerics, load, placement = setting.numerics, setting.load, setting.placement
    mixed = dataclasses.replace(numerics, activation=2, fused_norms=False)
    both = dataclasses.replace(mixed, target=2)
    precision = "trainer.precision=bf16-mixed"
    full = numerics.activation == WIDE
    yield [(precision, dataclasses.replace(setting, numerics=mixed))] if full else []
    lower = "target.dtype=bfloat16" + (f" {precision}" if full else "")
    yield [(lower, dataclasses.replace(setting, numerics=both))] if numerics.target == WIDE else []
    yield [("features.ahead=false", dataclasses.replace(setting, ahead=False))] if setting.ahead else []
    yield [
        (f"features.rows={rows}", dataclasses.replace(setting, target_rows=rows))
        for rows in (_halved(min(setting.target_rows or load.sequences, load.sequences)) if setting.online else ())
    ]
    yield [
        (f"data.batch_size={size}", dataclasses.replace(setting, load=_resized(load, sequences=size)))
        for size in _halved(load.sequences)
    ]
    shared = [placement.devices] if placement.devices > 1 else [2, 4, 8, 16]
    yield (
        [
            (
                "trainer=fsdp" + ("" if placement.devices > 1 else f" trainer.devices={devices}"),
                dataclasses.replace(setting, placement=Placement(devices, sharded=setting.online, drafter="sharded")),
            )
            for devices in shared
        ]
        if placement.drafter == "whole" and not placement.sharded
        else []
    )
    rollout = setting.kinds[-1]
    yield (
        [("checkpoint_steps=true", dataclasses.replace(setting, checkpoint_steps=True))]
        if rollout.own_head and rollout.steps > 1 and not setting.checkpoint_steps
        else []
    )
    reducible = rollout.own_head and (setting.drafter.draft_vocab_size or setting.drafter.vocab_size) > DRAFT_VOCABULARY
    smaller = dataclasses.replace(setting.drafter, draft_vocab_size=DRAFT_VOCABULARY)
    yield (
        [(f"variant.draft_vocab_size={DRAFT_VOCABULARY}", dataclasses.replace(setting, drafter=smaller))]
        if reducible
        else []
    )
    yield (
        [("features=store (eaglelab cache first)", dataclasses.replace(setting, online=False))]
        if setting.online
        else []
    )
    yield [
        (
            f"data.max_length={length} data.row_length={length}",
            dataclasses.replace(setting, load=_resized(load, length=length)),
        )
        for length in _halved(row_length)
        if length >= 256
    ]


def _halved(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _resized(load: Load, *, sequences: int | None = None, length: int | None = None) -> Load:
    """Fewer sequences or shorter ones; supervised rows shrink alike."""
    many, long = sequences or load.sequences, length or load.length
    share = many * long / load.tokens
    rows = max(long - (load.length - load.rows_each), 1)
    span = None if load.span is None else min(load.span, rows)
    roots = None if load.roots is None else max(round(load.roots * long / load.length), 1)
    supervised = max(round(load.loss_rows * share), 1)
    return dataclasses.replace(
        load, sequences=many, length=long, rows=rows, supervised=supervised, span=span, roots=roots
    )
