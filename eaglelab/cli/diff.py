"""``eaglelab diff RUN RUN``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from omegaconf import DictConfig

from eaglelab.cli.checks import writable
from eaglelab.cli.config import register_resolvers
from eaglelab.cli.errors import command
from eaglelab.cli.quiet import quiet_libraries

register_resolvers()


def main() -> None:
    """Folders may be given by themselves: the first ones are ``runs``."""
    arguments = sys.argv[1:]
    folders = [one for one in arguments if not one.startswith("-") and "=" not in one]
    if folders:
        quoted = ",".join(json.dumps(one) for one in folders)
        sys.argv[1:] = [*(one for one in arguments if one not in folders), f"runs=[{quoted}]"]
    _main()


@command("diff")
def _main(config: DictConfig) -> None:
    """Print what separates runs."""
    from eaglelab.comparison import diff_table, differences

    out = None if config.out is None else writable(config.out)
    quiet_libraries()
    paths = [*(one for one in (config.a, config.b) if one is not None), *config.runs]
    if len(paths) < 2:
        raise ValueError(f"a difference is between two runs, {len(paths)} given: eaglelab diff RUN RUN")
    found = differences(_labels(paths))
    print(diff_table(found))
    if out is not None:
        content = json.dumps([one.to_dict() for one in found], indent=1)
        out.write_text(content + "\n", encoding="utf-8")


def _labels(paths: list[str]) -> dict[str, str]:
    """Label -> folder: the folders' last parts where they tell them apart, else the whole paths.

    Raises:
        ValueError: the same folder twice.
    """
    if len({str(Path(path).resolve()) for path in paths}) < len(paths):
        raise ValueError(f"{', '.join(paths)}: one run is there twice; give different folders")
    names = [Path(path).resolve().name for path in paths]
    return dict(zip(names if len(set(names)) == len(names) else paths, paths, strict=True))


if __name__ == "__main__":
    main()
