"""``eaglelab compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

if TYPE_CHECKING:
    from eaglelab.comparison import Plan

register_resolvers()

LISTS = ("variants", "train", "seeds", "suites", "trees", "temperatures", "batches")


@command("compare")
def main(config: DictConfig) -> None:
    """Compare drafters; prints the tables, writes ``results.json``, ``results.parquet`` and ``report.html``."""
    from hydra.core.hydra_config import HydraConfig

    from eaglelab.cli.compose import compose_training
    from eaglelab.comparison import Difference, compare, comparison_table, diff_table

    quiet_libraries()
    plan = plan_of(config)
    try:
        results = compare(plan, compose_training)
    except KeyboardInterrupt:
        command = " ".join(["eaglelab compare", *HydraConfig.get().overrides.task])
        print(f"\ninterrupted; what was done is kept. Continue with the same command:\n  {command}", file=sys.stderr)
        raise SystemExit(130) from None
    print(f"\n{comparison_table(results)}")
    found = [Difference(one["section"], one["field"], one["values"]) for one in results["diff"]]
    print(f"\nwhat separates these runs\n{'-' * 100}\n{diff_table(found)}")
    for note in results["notes"]:
        print(f"\nnote: {note}")
    print(f"\nwritten: {plan.out}/results.json, results.parquet{_report(plan.out)}")


def plan_of(config: DictConfig) -> Plan:
    """The comparison that a configuration asks for.

    Raises:
        ValueError: a setting out of range, with the way out.
    """
    from eaglelab.comparison import Budget, Plan, recipes_for
    from eaglelab.decoding import Sampling

    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    for name in LISTS:
        if plain[name] is not None and not isinstance(plain[name], list):
            plain[name] = [plain[name]]  # seeds=3 is seeds=[3]
    for name, usage in (("budget", "budget.value=90"), ("runs", "'runs={name: DIR}'"), ("recipes", "recipes={...}")):
        if plain[name] is not None and not isinstance(plain[name], dict):
            raise ValueError(f"{name}={plain[name]} is not understood; write {usage}")
    given = {name: [one] if isinstance(one, str) else list(one) for name, one in (plain["runs"] or {}).items()}
    variants = plain["variants"]
    if variants is None:
        variants = [] if given else ["eagle", "hass", "eagle3"]
    recipes = recipes_for(variants, plain["recipes"] or {})
    for name in given:
        if name in recipes:
            raise ValueError(f"{name} is a variant and a given run; rename the run, or leave the variant out")
    unknown = [name for name in plain["trees"] if name not in plain["shapes"]]
    if unknown:
        raise ValueError(
            f"trees: {unknown[0]!r} is not one of {', '.join(plain['shapes'])}; a shape of your own is "
            f"+shapes.{unknown[0]}={{name: dynamic, width: 4, depth: 6, budget: 16}}"
        )
    return Plan(
        out=Path(plain["out"]),
        recipes=recipes,
        given=given,
        train=plain["train"] or [],
        budget=Budget(**plain["budget"]),
        seeds=plain["seeds"],
        suites=plain["suites"],
        limit=plain["limit"],
        turns=plain["turns"],
        max_new_tokens=plain["max_new_tokens"],
        trees={name: plain["shapes"][name] for name in plain["trees"]},
        temperatures=plain["temperatures"],
        batches=plain["batches"],
        sampling=Sampling(
            top_k=plain["top_k"],
            top_p=float(plain["top_p"]),
            min_p=float(plain["min_p"]),
            repetition_penalty=float(plain["repetition_penalty"]),
            seed=plain["sampling_seed"],
        ),
        dtype=plain["dtype"],
        device=plain["device"],
        source=plain["target"]["source"],
        resamples=plain["resamples"],
    )


def _report(folder: Path) -> str:
    """Write the page, where this installation can."""
    import eaglelab.report

    return f", {eaglelab.report.write_report(folder)}"


if __name__ == "__main__":
    main()
