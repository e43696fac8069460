"""The tests; a process that a test started gets the seeded fault of its parent."""

import os

if _fault := os.environ.get("EAGLELAB_MUTANT"):
    from tests.mutants import MUTANTS

    MUTANTS[_fault].apply()
