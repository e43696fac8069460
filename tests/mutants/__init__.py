"""Seeded faults of training, decoding and storage, one per trap, each with the test that must notice it.

Every mutant leaves all shapes as they were. A room is a file of them. ``apply`` changes the loaded package; as a plugin
of pytest (``-p tests.mutants --mutant NAME``) this package does so before any test module is imported, and processes
that a test starts and that import ``tests`` get the fault too. ``eaglelab-lab`` runs them all.
"""

import os

from tests.mutants import (
    ahead,
    commit,
    distributed,
    formats,
    manifests,
    maps,
    objectives,
    optimisation,
    rollout,
    rows,
    sampling,
    store,
    taps,
    trees,
)
from tests.mutants.registry import MUTANTS, Mutant

VARIABLE = "EAGLELAB_MUTANT"
"""Names the fault for the processes that a test starts."""

__all__ = [
    "MUTANTS",
    "VARIABLE",
    "Mutant",
    "ahead",
    "commit",
    "distributed",
    "formats",
    "manifests",
    "maps",
    "objectives",
    "optimisation",
    "rollout",
    "rows",
    "sampling",
    "store",
    "taps",
    "trees",
]


def pytest_addoption(parser) -> None:
    parser.addoption("--mutant", help="apply this fault before the tests")


def pytest_configure(config) -> None:
    if name := config.getoption("--mutant"):
        MUTANTS[name].apply()
        os.environ[VARIABLE] = name
