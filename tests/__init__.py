"""The tests; a process that a test started gets the seeded fault of its parent."""

import os
import sys

if (_fault := os.environ.get("EAGLELAB_MUTANT")) and "pytest" not in sys.modules:
    from tests.mutants import MUTANTS

    MUTANTS[_fault].apply()
