"""``eaglelab export``."""

from __future__ import annotations

from omegaconf import DictConfig

from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@command("export")
def main(config: DictConfig) -> None:
    """Write a run's drafter in another project's format."""
    from eaglelab.formats import export_drafter
    from eaglelab.training import RunFolder

    quiet_libraries()
    out = export_drafter(
        RunFolder.existing(config.run),
        config.format,
        config.out,
        checkpoint=config.checkpoint,
        dtype=config.dtype,
        draft_tokens=config.draft_tokens,
        verifier=config.verifier,
        target_source=config.target.source,
        overwrite=config.overwrite,
    )
    print(f"written: {out} (format {config.format}, {config.dtype}); its README.md says how to start it")


if __name__ == "__main__":
    main()
