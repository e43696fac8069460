"""``eaglelab report``."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


@command("report")
def main(config: DictConfig) -> None:
    """Write the page of a comparison, or one of draft trees, and say where it is."""
    from eaglelab.report import write_report, write_trees

    if (config.compare is None) == (config.trees is None):
        raise ValueError(
            "give one of compare=DIR (what `eaglelab compare` wrote) and trees=FILE_OR_DIR (records of rounds)"
        )
    for name, least in (("answers", 0), ("max_rounds", 1)):
        if type(config[name]) is not int or config[name] < least:
            raise ValueError(f"{name}={config[name]}: give a whole number from {least} on")
    quiet_libraries()
    ids = None if config.ids is None else [str(one) for one in config.ids]
    if config.trees is not None:
        page = write_trees(config.trees, config.out, ids=ids, max_rounds=config.max_rounds)
        print(f"written: {page}")
        return
    where = OmegaConf.to_container(config.where)
    assert isinstance(where, dict)
    page = write_report(config.compare, answers=config.answers, ids=ids, where={str(k): v for k, v in where.items()})
    print(f"written: {page}, and beside it figures/ (SVG, PNG) and tables/ (LaTeX, Markdown)")


if __name__ == "__main__":
    main()
