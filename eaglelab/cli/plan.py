"""``eaglelab plan``."""

from __future__ import annotations

from omegaconf import DictConfig

from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@command("plan", missing_allowed=True)
def main(config: DictConfig) -> None:
    """Tell what a training will need; prints a table, and writes the figures to ``out``."""
    import json
    from pathlib import Path

    from eaglelab.planning import make_plan, plan_table

    quiet_libraries()
    plan = make_plan(config)
    print(plan_table(plan))
    if config.out:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        Path(config.out).write_text(json.dumps(plan.to_dict(), indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {config.out}")


if __name__ == "__main__":
    main()
