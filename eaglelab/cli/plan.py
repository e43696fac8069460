"""``eaglelab plan``."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from eaglelab.cli.checks import writable
from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@command("plan", missing_allowed=True)
def main(config: DictConfig) -> None:
    """Tell what a training will need; prints a table, and writes the figures to ``out``."""
    import json

    from eaglelab.planning import make_plan, plan_table

    if OmegaConf.is_missing(config.target, "source") and config.shape.hidden_size is None:
        raise ValueError("Missing mandatory value: target.source; give target.source=..., or the shape.* of a target")
    if OmegaConf.is_missing(config.data, "path") and config.data_tokens is None:
        raise ValueError("Missing mandatory value: data.path; give data.path=..., or data_tokens=NUMBER")
    out = None if config.out is None else writable(config.out)
    quiet_libraries()
    plan = make_plan(config)
    print(plan_table(plan))
    if out is not None:
        out.write_text(json.dumps(plan.to_dict(), indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {out}")


if __name__ == "__main__":
    main()
