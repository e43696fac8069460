"""eaglelab-lab: run the seeded faults, each against the test that must notice it.

    eaglelab-lab list [NAME ...]
    eaglelab-lab run [NAME ...] [-j N] [--out FILE] [--again]

NAME is a fault or a room (a file of them); none means all. A fault is killed when its test passes without it and fails
with it. Results go into FILE after every job, and a job that has one there is not run again unless the code changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
OUT = Path("outputs") / "lab.json"
PRELOADED = ["torch", "lightning", "transformers", "datasets", "hypothesis", "pytest"]
"""What the tests import and no fault changes: loaded once, where processes can be forked."""
PASSED, FAILED = int(pytest.ExitCode.OK), int(pytest.ExitCode.TESTS_FAILED)


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of one test, with a fault or (``fault=None``) without."""

    test: str
    fault: str | None = None

    @property
    def key(self) -> str:
        return self.fault or self.test


Runner = Callable[[Job], int]
"""Runs a job and returns pytest's exit code."""


# ---- one job -----------------------------------------------------------------------------------------------------


def pytest_arguments(job: Job) -> list[str]:
    fault = [f"--mutant={job.fault}"] if job.fault else []
    return ["-p", "tests.mutants", "-p", "no:cacheprovider", "-x", "-m", "slow or not slow", *fault, job.test]


def _work(job: Job, log: str) -> None:
    os.chdir(ROOT)
    with open(log, "w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        sys.exit(int(pytest.main(pytest_arguments(job))))


class ProcessRunner:
    """Each job in a process of its own; what it printed is kept in ``folder`` under its number.

    Args:
        timeout: seconds after which a job is ended; that counts as neither passed nor failed.
    """

    def __init__(self, folder: Path, timeout: float = 1800) -> None:
        self.folder, self.timeout = folder, timeout
        self.folder.mkdir(parents=True, exist_ok=True)
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: BaseContext = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            self._context.set_forkserver_preload(PRELOADED)

    def log(self, job: Job) -> Path:
        return self.folder / f"{hashlib.sha256(job.key.encode()).hexdigest()[:12]}.log"

    def __call__(self, job: Job) -> int:
        process = self._context.Process(target=_work, args=(job, str(self.log(job))))  # type: ignore[attr-defined]
        process.start()
        process.join(self.timeout)
        if process.is_alive():
            process.kill()
            process.join()
        return int(process.exitcode)


# ---- all of them -------------------------------------------------------------------------------------------------


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Faults by name or by room, in the order of the registry; all of them where no name is given.

    Raises:
        ValueError: neither a fault nor a room.
    """
    rooms = {mutant.room for mutant in MUTANTS.values()}
    if unknown := sorted(set(names) - rooms - set(MUTANTS)):
        raise ValueError(
            f"no fault or room {', '.join(unknown)}; rooms: {', '.join(sorted(rooms))}; `eaglelab-lab list` names all"
        )
    return [one for one in MUTANTS.values() if not names or {one.name, one.room} & set(names)]


def code_digest(root: Path = ROOT) -> str:
    """Of every Python file that a job may read."""
    digest = hashlib.sha256()
    for folder in ("eaglelab", "tests", "configs"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".yaml", ".json", ".safetensors") and "assets" not in path.parts:
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class Results:
    """Exit codes and seconds by job, in a file that is whole after every job.

    Args:
        code: results of another code are forgotten.
    """

    def __init__(self, file: Path, code: str) -> None:
        self.file = file
        self.jobs: dict[str, dict[str, Any]] = {}
        self.code = code
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            self.jobs = kept["jobs"] if kept["code"] == code else {}

    def add(self, job: Job, exit_code: int, seconds: float) -> None:
        self.jobs[job.key] = {"exit": exit_code, "seconds": round(seconds, 1)}
        self.save({})

    def save(self, summary: dict[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_name(self.file.name + ".part")
        part.write_text(json.dumps({**summary, "code": self.code, "jobs": self.jobs}, indent=1) + "\n", "utf-8")
        part.replace(self.file)

    def outcome(self, mutant: Mutant) -> str:
        """killed, survived, or why it cannot be told."""
        healthy, mutated = (self.jobs.get(key) for key in (mutant.killed_by, mutant.name))
        if healthy is None or mutated is None:
            return "not run"
        if healthy["exit"] != PASSED:
            return "its test fails without the fault"
        if mutated["exit"] in (PASSED, FAILED):
            return "survived" if mutated["exit"] == PASSED else "killed"
        return f"its test did not run (exit code {mutated['exit']})"


def jobs_for(mutants: Sequence[Mutant]) -> Iterator[Job]:
    """Each test once as it is, then every fault."""
    for test in dict.fromkeys(mutant.killed_by for mutant in mutants):
        yield Job(test)
    for mutant in mutants:
        yield Job(mutant.killed_by, mutant.name)


def run(mutants: Sequence[Mutant], results: Results, runner: Runner, *, parallel: int = 1) -> int:
    """Run what has no result yet, then print what survived; the exit code of the command."""
    waiting = [job for job in jobs_for(mutants) if job.key not in results.jobs]

    def timed(job: Job) -> tuple[Job, int, float]:
        began = time.perf_counter()
        return job, runner(job), time.perf_counter() - began

    with ThreadPoolExecutor(parallel) as pool, tqdm(total=len(waiting), desc="lab", unit="job") as bar:
        futures = [pool.submit(timed, job) for job in waiting]
        try:
            for future in as_completed(futures):
                job, code, seconds = future.result()
                results.add(job, code, seconds)
                bar.set_postfix_str(f"{job.key.rpartition('::')[2]}: exit {code}", refresh=False)
                bar.update()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            print(f"stopped; the same command goes on from {results.file}", file=sys.stderr)
            return 130
    return report(mutants, results)


def report(mutants: Sequence[Mutant], results: Results) -> int:
    """Print the table, the verdict last, and write it; 1 unless all are killed."""
    table = [
        {"name": one.name, "room": one.room, "fault": one.trap, "test": one.killed_by, "outcome": results.outcome(one)}
        for one in mutants
    ]
    for room in dict.fromkeys(row["room"] for row in table):
        rows = [row for row in table if row["room"] == room]
        print(f"{room:<14} {sum(row['outcome'] == 'killed' for row in rows):>3} of {len(rows)} killed")
    alive = [row for row in table if row["outcome"] != "killed"]
    for row in alive:
        print(f"\n{row['outcome'].upper()}: {row['name']}, {row['fault']}\n  {row['test']}")
    killed = len(table) - len(alive)
    results.save({"killed": killed, "of": len(table), "mutants": table})
    print(
        f"\n{killed} of {len(table)} killed" + (f", {len(alive)} not: see above" if alive else "") + f"; {results.file}"
    )
    return int(bool(alive))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("eaglelab-lab", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("list", "run"):
        one = verbs.add_parser(verb)
        one.add_argument("names", nargs="*", metavar="NAME", help="a fault or a room; none: all")
    one.add_argument("-j", type=int, default=1, metavar="N", help="jobs at a time (1)")
    one.add_argument("--out", type=Path, default=OUT, metavar="FILE", help=f"where results are kept ({OUT})")
    one.add_argument("--again", action="store_true", help="forget the results that are there")
    asked = parser.parse_args(arguments)
    try:
        mutants = chosen(asked.names)
    except ValueError as error:
        parser.error(str(error))
    if asked.verb == "list":
        for mutant in mutants:
            print(f"{mutant.room:<13} {mutant.name:<34} {mutant.trap}")
        print(f"{len(mutants)} faults")
        return 0
    if asked.j < 1:
        parser.error(f"-j {asked.j}: run at least one job at a time")
    if asked.j > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if asked.again:
        asked.out.unlink(missing_ok=True)
    results = Results(asked.out, code_digest())
    return run(mutants, results, ProcessRunner(asked.out.with_suffix("")), parallel=asked.j)


if __name__ == "__main__":
    sys.exit(main())
