"""eaglelab-lab: the seeded faults of the tests. For developers: it needs the repository, not only the package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import eaglelab


def main() -> None:
    """Run ``tests.mutants.lab`` of the checkout that this package is imported from."""
    root = Path(eaglelab.__file__).parents[1]
    if not (root / "tests" / "mutants").is_dir():
        sys.exit(
            "eaglelab-lab runs the faults that are seeded in the tests, and the installed package has no tests. "
            'Clone the repository and install it with pip install -e ".[dev]"'
        )
    sys.path.insert(0, str(root))
    try:
        lab = importlib.import_module("tests.mutants.lab")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("eaglelab", "tests"):
            raise
        sys.exit(f'eaglelab-lab needs {error.name}: pip install -e ".[dev]"')
    sys.exit(lab.main())


if __name__ == "__main__":
    main()
