"""``eaglelab import``."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@command("import")
def main(config: DictConfig) -> None:
    """Turn a published drafter into a run folder."""
    from eaglelab.formats import import_drafter, training_overrides
    from eaglelab.target import FrozenTarget

    quiet_libraries()
    target = FrozenTarget.load(**config.target)
    settings = OmegaConf.to_container(config, resolve=True)
    assert isinstance(settings, dict)
    drafter = import_drafter(
        str(config.source),
        target,
        config.out,
        overwrite=config.overwrite,
        format=config.format,
        variant=config.variant,
        taps=settings["taps"],
        trust=settings["trust"],
        revision=config.revision,
    )
    for note in drafter.notes:
        print(note)
    print(f"written: {config.out} (read as {drafter.format}, variant {drafter.manifest.variant})")
    print(f"next: eaglelab evaluate run={config.out}")
    print(f"      python train.py init_from={config.out} {' '.join(training_overrides(drafter, target))}")


if __name__ == "__main__":
    main()
