"""The tests; a process that a test started gets the seeded fault of its parent."""

import multiprocessing
import os

if (_fault := os.environ.get("EAGLELAB_MUTANT")) and multiprocessing.parent_process():
    from tests.mutants import MUTANTS

    MUTANTS[_fault].apply()
