"""``eaglelab bench``, and which command ``eaglelab bench decoding``, ``kernels`` and ``rounds`` are."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from eaglelab.cli.checks import writable
from eaglelab.cli.errors import command


def main() -> None:
    """Measure training steps, or what the first word says: how a run's drafter decodes, single operations, or rounds of
    decoding without trained weights."""
    word = sys.argv[1] if sys.argv[1:] else ""
    if word in ("decoding", "kernels", "rounds"):
        del sys.argv[1]
        importlib.import_module(f"eaglelab.cli.bench_{word}").main()
    else:
        training()


@command("bench")
def training(config: DictConfig) -> None:
    """Measure one training step of every variant, and the literal one beside it; prints tables."""
    import torch

    from eaglelab.training.cost import Conditions, Shape, cost_table, measure
    from eaglelab.training.versus import (
        contest,
        contest_table,
        growth,
        growth_table,
        points_for,
        quantities,
        race,
        race_table,
    )
    from eaglelab.variants import VARIANTS

    variants = [config.variants] if isinstance(config.variants, str) else list(config.variants)
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise ValueError(f"variants={unknown[0]!r} is not one of {', '.join(VARIANTS)}")
    if config.steps < 1:
        raise ValueError(f"steps={config.steps}: measure at least one")
    conditions = Conditions(config.device, config.precision, config.random_features, config.kernels)
    if config.device == "cuda" and (config.split or not torch.cuda.is_available()):
        raise ValueError("device=cuda: needs a GPU, and split=false, which is measured on the CPU alone")
    growing = [config.growth] if isinstance(config.growth, str) else list(config.growth)
    if unknown := [over for over in growing if over not in config.points]:
        raise ValueError(f"growth={unknown[0]!r} is not one of {', '.join(config.points)}")
    curves = [(over, name) for over in growing for name in variants if over in quantities(name)]
    if unmeasured := set(growing).difference(over for over, _ in curves):
        raise ValueError(f"growth={min(unmeasured)!r} is no quantity of {', '.join(variants)}; choose other variants")
    points = {curve: points_for(curve[1], curve[0], list(config.points[curve[0]])) for curve in curves}
    out, shape = None if config.out is None else writable(config.out), Shape(**config.shape)
    cases = _cases(config, variants)
    if not cases or not (config.split or config.literal or config.shipped or curves):
        raise ValueError(
            "nothing is left to measure: leave split, shipped or literal on, or name quantities in growth; and name "
            "variants"
        )
    found: dict[str, list[dict[str, Any]]] = {}
    if config.split:
        costs = [
            measure(variant, shape, settings, steps=config.steps, conditions=conditions, name=name)
            for name, (variant, settings) in cases.items()
        ]
        print(cost_table(costs), flush=True)
        found["split"] = [cost.to_dict() for cost in costs]
    if config.shipped:
        steps = race(cases, shape, repetitions=config.steps, conditions=conditions)
        print(race_table(steps), flush=True)
        found["shipped"] = [steps.to_dict()]
    if config.literal:
        contests = [
            contest(variant, shape, settings, repetitions=config.steps, conditions=conditions, name=name)
            for name, (variant, settings) in cases.items()
        ]
        print(contest_table(contests), flush=True)
        found["literal"] = [one.to_dict() for one in contests]
    for over, name in curves:
        settings = next(settings for variant, settings in cases.values() if variant == name)
        curve = growth(name, shape, settings, over, points[over, name], conditions=conditions)
        print(growth_table(curve), flush=True)
        found.setdefault("growth", []).append(curve.to_dict())
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _cases(config: DictConfig, variants: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Variant and settings by name; EAGLE-3 once for each draft vocabulary that is asked for."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for variant in variants:
        settings: Any = OmegaConf.to_container(config.settings)[variant]  # type: ignore[index, call-overload]
        if not isinstance(settings, dict):
            raise ValueError(f"settings.{variant}: {settings!r} is no mapping of switches")
        if variant == "eagle3" and config.draft_vocab_sizes:
            for size in config.draft_vocab_sizes:
                cases[f"{variant} {size}"] = variant, settings | {"draft_vocab_size": size}
        else:
            cases[variant] = variant, settings
    return cases


if __name__ == "__main__":
    main()
