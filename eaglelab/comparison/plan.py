"""What a comparison is asked to do, checked before anything runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from eaglelab.decoding import Sampling, TreePolicy, make_tree
from eaglelab.variants import VARIANTS

Unit = Literal["rows", "steps", "flops", "seconds"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*")


@dataclasses.dataclass(frozen=True)
class Budget:
    """What every training may spend.

    unit: ``rows`` (supervised rows that enter the loss, with repetition), ``steps`` (optimizer steps), ``flops``
        (operations of the training steps, `eaglelab.training.flops`) or ``seconds`` (of training steps, by a timed
        calibration that is then fixed in steps; validation and start come on top).
    value: one number for all, or one by name.
    """

    unit: Unit
    value: float | Mapping[str, float]

    def of(self, name: str) -> float:
        """The budget of one name.

        Raises:
            ValueError: values were given by name, and this one has none.
        """
        if not isinstance(self.value, Mapping):
            return self.value
        if name not in self.value:
            raise ValueError(f"budget.value has no entry for {name}; give one number for all, or one for every name")
        return self.value[name]

    def to_dict(self) -> dict[str, Any]:
        value = dict(self.value) if isinstance(self.value, Mapping) else self.value
        return {"unit": self.unit, "value": value}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A comparison.

    out: its folder.
    recipes: name -> overrides of the training configuration; trained here, in this order.
    given: name -> run folders that exist already, one per training seed.
    train: overrides of every training.
    suites: names or files; limit: questions of each; turns: "first" or "all".
    trees: name -> settings of `make_tree`.
    sampling: of temperature 1; the grid sets the temperature.
    dtype, device, source: how the target is loaded for decoding; source None: from where the runs say.
    resamples: of every bootstrap and swap test.
    """

    out: Path
    recipes: Mapping[str, Sequence[str]]
    given: Mapping[str, Sequence[str]]
    train: Sequence[str]
    budget: Budget
    seeds: Sequence[int]
    suites: Sequence[str]
    limit: int | None
    turns: str
    max_new_tokens: int
    trees: Mapping[str, Mapping[str, Any]]
    temperatures: Sequence[float]
    batches: Sequence[int]
    sampling: Sampling
    dtype: str = "float32"
    device: str = "cpu"
    source: str | None = None
    resamples: int = 10_000

    def __post_init__(self) -> None:
        for name in self.names:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a drafter: use letters, digits, _ and . (it names a folder)")
        if not self.names:
            raise ValueError("nothing to compare: give variants=[eagle,hass,eagle3], or 'runs={name: DIR, ...}'")
        if self.budget.unit not in get_args(Unit):
            raise ValueError(f"budget.unit={self.budget.unit!r} is not one of {', '.join(get_args(Unit))}")
        for name in self.recipes:
            _check_number("budget.value", self.budget.of(name), (int, float))
            if self.budget.of(name) <= 0:
                raise ValueError(f"budget.value={self.budget.of(name):g} trains nothing; give a positive number")
        for what in ("seeds", "suites", "trees", "temperatures", "batches"):
            _check_list(what, list(getattr(self, what)))
        for what, kinds in (("seeds", int), ("batches", int), ("temperatures", (int, float))):
            for value in getattr(self, what):
                _check_number(what, value, kinds)
        for what in ("limit", "max_new_tokens", "resamples"):
            if (value := getattr(self, what)) is not None:
                _check_number(what, value, int)
        for seed in self.seeds:
            if seed < 0:
                raise ValueError(f"seeds={list(self.seeds)}: a seed is 0 or more")
        for batch in self.batches:
            if batch < 1:
                raise ValueError(f"batches={list(self.batches)}: decode at least one prompt at a time")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit} keeps no question; use a positive number, or null for all")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: ask for at least one token")
        if self.turns not in ("first", "all"):
            raise ValueError(f"turns={self.turns!r}: choose first or all")
        if self.resamples < 100:
            raise ValueError(f"resamples={self.resamples}: a 95 % interval needs at least 100")
        for temperature in self.temperatures:
            self.sampling_at(temperature)
        for name in self.trees:
            self.tree(name)

    @property
    def names(self) -> list[str]:
        """Of the drafters, in the order of every table."""
        return [*self.recipes, *self.given]

    def tree(self, name: str) -> TreePolicy | None:
        """The policy behind a tree's name."""
        return make_tree(**self.trees[name])

    def sampling_at(self, temperature: float) -> Sampling:
        return dataclasses.replace(self.sampling, temperature=float(temperature))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they go into ``comparison.json``."""
        return {
            "variants": list(self.recipes),
            "recipes": {name: list(overrides) for name, overrides in self.recipes.items()},
            "given": {name: list(folders) for name, folders in self.given.items()},
            "train": list(self.train),
            "budget": self.budget.to_dict(),
            "seeds": list(self.seeds),
            "suites": list(self.suites),
            "limit": self.limit,
            "turns": self.turns,
            "max_new_tokens": self.max_new_tokens,
            "trees": {name: dict(settings) for name, settings in self.trees.items()},
            "temperatures": list(self.temperatures),
            "batches": list(self.batches),
            "sampling": {k: v for k, v in sampling_settings(self.sampling).items() if k != "temperature"},
            "dtype": self.dtype,
            "device": self.device,
            "resamples": self.resamples,
        }


def recipes_for(variants: Sequence[str], recipes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Overrides of every name in ``variants``: its recipe, or ``variant=NAME``.

    Raises:
        ValueError: a name that is neither a variant nor has a recipe, or is there twice.
    """
    _check_list("variants", variants, empty=True)
    chosen = {}
    for name in variants:
        if name not in recipes and name not in VARIANTS:
            known = ", ".join([*VARIANTS, *recipes])
            raise ValueError(
                f"variants: {name!r} is not one of {known}; a recipe of your own is "
                f"\"recipes={{{name}: ['variant=eagle3', 'variant.steps=3']}}\""
            )
        chosen[name] = list(recipes.get(name, [f"variant={name}"]))
    return chosen


def sampling_settings(sampling: Sampling) -> dict[str, Any]:
    """Plain values of what decides a draw."""
    return {f.name: getattr(sampling, f.name) for f in dataclasses.fields(Sampling) if f.name != "processors"}


def _check_number(name: str, value: Any, kinds: type | tuple[type, ...]) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError(f"{name}: {value!r} is no {'whole ' if kinds is int else ''}number")


def _check_list(name: str, values: Sequence[Any], *, empty: bool = False) -> None:
    if not values and not empty:
        raise ValueError(f"{name}=[] leaves nothing to do; give at least one")
    twice = [value for place, value in enumerate(values) if value in values[:place]]
    if twice:
        raise ValueError(f"{name}: {twice[0]} is listed twice; remove one")
