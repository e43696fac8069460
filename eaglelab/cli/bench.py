"""``eaglelab bench`` and ``eaglelab bench decoding``."""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from eaglelab.cli.checks import writable
from eaglelab.cli.errors import command


def main() -> None:
    """Measure training steps, or with ``decoding`` as the first word how a run's drafter decodes."""
    if sys.argv[1:2] == ["decoding"]:
        from eaglelab.cli.bench_decoding import main as decoding

        del sys.argv[1]
        decoding()
    else:
        training()


@command("bench")
def training(config: DictConfig) -> None:
    """Measure one training step of every variant; prints a table."""
    from eaglelab.training.cost import Shape, cost_table, measure, save_costs
    from eaglelab.variants import VARIANTS

    variants = [config.variants] if isinstance(config.variants, str) else list(config.variants)
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise ValueError(f"variants={unknown[0]!r} is not one of {', '.join(VARIANTS)}")
    if config.steps < 1:
        raise ValueError(f"steps={config.steps}: measure at least one")
    out, shape = None if config.out is None else writable(config.out), Shape(**config.shape)
    costs = [measure(name, shape, steps=config.steps) for name in variants]
    print(cost_table(costs))
    if out is not None:
        save_costs(costs, out)


if __name__ == "__main__":
    main()
