"""Every seeded fault is noticed by the test that claims to."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import MUTANTS


def outcome(test: str, *arguments: str) -> subprocess.CompletedProcess:
    job = [sys.executable, "-m", "pytest", "-p", "tests.mutants", "-x", "-m", "slow or not slow", *arguments, test]
    return subprocess.run(job, cwd=Path(__file__).parents[1], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    result = outcome(MUTANTS[name].killed_by, f"--mutant={name}")
    assert result.returncode == 1, f"survived: {MUTANTS[name].trap}\n{result.stdout[-2000:]}"  # 1: a test failed


@pytest.mark.slow
@pytest.mark.parametrize("test", sorted({m.killed_by for m in MUTANTS.values()}))
def test_the_same_tests_pass_without_a_mutant(test):
    result = outcome(test)
    assert result.returncode == 0, result.stdout[-2000:]
