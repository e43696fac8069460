"""eaglelab-lab: what it runs, what it keeps, what it says; and that every known trap has a fault."""

import json
import re
from pathlib import Path

import pytest

import eaglelab
from eaglelab.cli import lab as command
from tests.mutants import MUTANTS
from tests.mutants.lab import Job, ProcessRunner, Results, chosen, jobs_for, main, run
from tests.mutants.registry import TRAPS

ROOT = Path(__file__).parents[1]
ROWS = chosen(["rows"])


def test_every_trap_has_its_faults():
    assert len(TRAPS) == 31
    assert {name for names in TRAPS.values() for name in names} <= set(MUTANTS)
    assert all(TRAPS.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_the_test_that_must_notice_exists(name):
    path, test = MUTANTS[name].killed_by.split("::")
    assert re.search(rf"^def {test.partition('[')[0]}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_names_are_faults_or_rooms():
    assert {one.name for one in chosen(["any_store", "taps"])} == {"any_store"} | {
        one.name for one in MUTANTS.values() if one.room == "taps"
    }
    assert chosen([]) == list(MUTANTS.values())
    with pytest.raises(ValueError, match="no fault or room tap; rooms: ahead, commit, distributed"):
        chosen(["tap"])


def test_each_test_is_run_once_without_a_fault():
    jobs = list(jobs_for(ROWS))
    assert len(jobs) == len(ROWS) + len({one.killed_by for one in ROWS})
    assert [job.fault for job in jobs if job.fault] == [one.name for one in ROWS]


class Script:
    """Tests pass without a fault; with one they fail, unless it is listed."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.seen = codes, []

    def __call__(self, job: Job) -> int:
        self.seen.append(job.key)
        return self.codes.get(job.key, 1 if job.fault else 0)


@pytest.mark.parametrize("parallel", [1, 3])
def test_all_killed_is_success(parallel, tmp_path, capsys):
    results = Results(tmp_path / "lab.json", "code")
    assert run(ROWS, results, Script(), parallel=parallel) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{len(ROWS)} of {len(ROWS)} killed; ")
    written = json.loads((tmp_path / "lab.json").read_text())
    assert written["killed"] == written["of"] == len(ROWS)
    assert {row["name"]: row["outcome"] for row in written["mutants"]} == {one.name: "killed" for one in ROWS}


@pytest.mark.parametrize(
    ("code", "said"), [(0, "SURVIVED"), (5, "DID NOT RUN (EXIT CODE 5)"), (-9, "DID NOT RUN (EXIT CODE -9)")]
)
def test_one_that_is_not_killed_fails_and_is_printed_last(code, said, tmp_path, capsys):
    assert run(ROWS, Results(tmp_path / "lab.json", "code"), Script(token_shift=code)) == 1
    first, last = capsys.readouterr().out.split("\n\n", 1)
    assert said in last and "token_shift, advanced tokens shifted by one row" in last
    assert "token_shift" not in first
    assert f"{len(ROWS) - 1} of {len(ROWS)} killed, 1 not" in last


def test_a_test_that_fails_anyway_kills_nothing(tmp_path, capsys):
    broken = ROWS[0].killed_by
    assert run(ROWS, Results(tmp_path / "lab.json", "code"), Script(**{broken: 1})) == 1
    of_it = sum(one.killed_by == broken for one in ROWS)
    assert capsys.readouterr().out.count("ITS TEST FAILS WITHOUT THE FAULT") == of_it > 1


class StopsAt(Script):
    def __call__(self, job: Job) -> int:
        if job.key == "label_shift":
            raise KeyboardInterrupt
        return super().__call__(job)


def test_it_goes_on_where_it_was_stopped_unless_the_code_changed(tmp_path):
    file, rest = tmp_path / "lab.json", Script()
    assert run(ROWS, Results(file, "code"), StopsAt()) == 130
    done = set(Results(file, "code").jobs)
    assert run(ROWS, Results(file, "code"), rest) == 0
    assert done and "label_shift" in rest.seen
    assert not done & set(rest.seen)
    assert done | set(rest.seen) == {job.key for job in jobs_for(ROWS)}
    again = Script()
    assert run(ROWS, Results(file, "other code"), again) == 0
    assert len(again.seen) == len(list(jobs_for(ROWS)))


def test_list_and_unknown_names(capsys):
    assert main(["list", "maps"]) == 0
    assert "d2t read as absolute ids" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["run", "nothing"])
    assert end.value.code == 2
    assert "no fault or room nothing" in capsys.readouterr().err


def test_an_installed_package_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(eaglelab, "__file__", str(tmp_path / "site-packages" / "eaglelab" / "__init__.py"))
    with pytest.raises(SystemExit, match="the installed package has no tests. Clone the repository"):
        command.main()


@pytest.mark.slow
def test_a_fault_is_killed_in_a_process_of_its_own(tmp_path):
    test = "tests/objectives/test_objectives.py::test_smooth_l1_is_averaged_over_the_width_and_summed_over_rows"
    runner = ProcessRunner(tmp_path)
    assert runner(Job(test)) == 0
    job = Job(test, "regression_summed_over_the_width")
    assert runner(job) == 1
    assert "test_smooth_l1_is_averaged" in runner.log(job).read_text()
    assert runner(Job(test.replace("smooth", "rough"))) == 4  # no such test
