"""Every seeded fault is noticed by the test that claims to; `eaglelab-lab run` does the same faster."""

import subprocess
import sys

import pytest

from tests.mutants import MUTANTS
from tests.mutants.lab import ROOT, Job, pytest_arguments


def outcome(job: Job) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", *pytest_arguments(job)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    result = outcome(Job(MUTANTS[name].killed_by, name))
    assert result.returncode == 1, f"survived: {MUTANTS[name].trap}\n{result.stdout[-2000:]}"  # 1: a test failed


@pytest.mark.slow
@pytest.mark.parametrize("test", sorted({m.killed_by for m in MUTANTS.values()}))
def test_the_same_tests_pass_without_a_mutant(test):
    result = outcome(Job(test))
    assert result.returncode == 0, result.stdout[-2000:]
