"""``eaglelab bench``."""

from __future__ import annotations

from omegaconf import DictConfig

from eaglelab.cli.errors import command


@command("bench")
def main(config: DictConfig) -> None:
    """Measure one training step of every variant; prints a table."""
    from eaglelab.training.cost import Shape, cost_table, measure, save_costs
    from eaglelab.variants import VARIANTS

    if unknown := [name for name in config.variants if name not in VARIANTS]:
        raise ValueError(f"variants={unknown[0]!r} is not one of {', '.join(VARIANTS)}")
    if config.steps < 1:
        raise ValueError(f"steps={config.steps}: measure at least one")
    costs = [measure(name, Shape(**config.shape), steps=config.steps) for name in config.variants]
    print(cost_table(costs))
    if config.out:
        save_costs(costs, config.out)


if __name__ == "__main__":
    main()
