"""The comparison: train (or take) drafters, measure every cell of the grid, put the numbers together."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eaglelab.comparison.cells import Cell, CellStore, Run, grid
from eaglelab.comparison.diff import run_configuration
from eaglelab.comparison.gather import put_together, write_parquet
from eaglelab.comparison.plan import Plan
from eaglelab.comparison.progress import Progress
from eaglelab.comparison.record import Record, write_json
from eaglelab.comparison.trainings import Compose, Trainings, run_path
from eaglelab.drafters import SlotDrafter
from eaglelab.evaluation import Suite, load_suite
from eaglelab.target import FrozenTarget
from eaglelab.training import RunFolder


def compare(plan: Plan, compose: Compose) -> dict[str, Any]:
    """Run a comparison to its end, or go on with one that was cut short.

    Trainings that are finished and cells that were measured are taken as they are. Every file is whole at any moment,
    so that the process may be killed anywhere.

    Args:
        plan: what to compare.
        compose: composes a training configuration from overrides.

    Returns:
        The content of ``results.json``: ``runs``, ``rows`` (one per cell), ``summary`` (pooled over training seeds),
        ``contrasts``, ``diff`` and ``notes``.

    Raises:
        ValueError: a plan that cannot be carried out, or the folder holds something else; with the way out.
        Interrupted: Ctrl-C or SIGTERM; the same call goes on.
    """
    plan = dataclasses.replace(plan, out=plan.out.resolve())
    suites, given = load_suites(plan), given_runs(plan)
    with locked(plan.out):
        record = Record(plan)
        trainings = Trainings(plan, compose) if plan.recipes else None
        prepare(plan, record, trainings, given)
        with _progress(plan, record, suites) as progress:
            runs = train_all(plan, record, trainings, progress) if trainings is not None else []
            runs += [Run.of(name, seed, path) for name, seed, path in given]
            figures = measure(plan, runs, suites, progress)
        results = put_together(plan, record, runs, figures)
        write_json(plan.out / "results.json", results)
        write_parquet(plan.out / "results.parquet", results["rows"])
        shutil.rmtree(plan.out / "unfinished", ignore_errors=True)
    return results


def load_suites(plan: Plan) -> list[Suite]:
    """The questions of every suite.

    Raises:
        ValueError: a suite that cannot be read, or two of one name.
    """
    suites = [load_suite(source, plan.limit) for source in plan.suites]
    names = [suite.name for suite in suites]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"suites={list(plan.suites)}: two are called {name}; rename a file")
    return suites


def prepare(plan: Plan, record: Record, trainings: Trainings | None, given: Sequence[tuple[str, int, Path]]) -> None:
    """Settle target, steps and run folders, and write ``comparison.json`` before anything is trained."""
    for name, seed, path in given:
        record.meet(name, RunFolder.existing(path).manifest().target)
        copy_records(path, run_path(plan.out, name, seed))
        record.add_run(f"{name}-seed{seed}", {"name": name, "seed": seed, "given": str(path)})
    if trainings is not None:
        target = trainings.target()
        record.meet("variants", target.fingerprint)
        record.save()
        missing = [name for name in plan.recipes if name not in record.spent]
        record.spent |= trainings.resolve(target, missing)
        for name, config in trainings.configs.items():
            for seed in plan.seeds:
                fields = {"name": name, "seed": seed, "given": None, "overrides": trainings.overrides(name, seed)}
                fields |= {"variant_class": config.variant._target_, **record.spent[name].to_dict()}
                record.add_run(f"{name}-seed{seed}", fields)
    record.save()


def given_runs(plan: Plan) -> list[tuple[str, int, Path]]:
    """(name, training seed, folder) of every run that is not trained here.

    The seed is the one in the run's configuration; runs of one name with equal or no seeds are numbered.

    Raises:
        ValueError: no run there.
    """
    found = []
    for name, folders in plan.given.items():
        seeds = [run_configuration(RunFolder.existing(folder)).get("seed") for folder in folders]
        if None in seeds or len(set(seeds)) < len(seeds):
            seeds = list(range(len(folders)))
        found += [(name, int(seed or 0), Path(folder).resolve()) for seed, folder in zip(seeds, folders, strict=True)]
    return found


def copy_records(source: Path, folder: Path) -> None:
    """Bring a given run's papers into the comparison: everything but its checkpoints and evaluations."""
    for name in ("manifest.json", "metrics.json", ".hydra", "csv"):
        old, new = source / name, folder / name
        if old.is_dir():
            shutil.copytree(old, new, dirs_exist_ok=True)
        elif old.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(old, new)


def train_all(plan: Plan, record: Record, trainings: Trainings, progress: Progress) -> list[Run]:
    """Every name with every seed, in the order of the recipes; what is finished is not trained again."""
    runs = []
    for seed in plan.seeds:
        for name in plan.recipes:
            kind, spent = ("train", name), record.spent[name]
            if trainings.finished(name, seed, spent.steps):
                progress.skip(kind)
            else:
                with progress.job(kind, f"train {name}, seed {seed}, {spent.steps:,} steps"):
                    trainings.run(name, seed, spent)
            runs.append(Run.of(name, seed, run_path(plan.out, name, seed)))
    return runs


def measure(plan: Plan, runs: Sequence[Run], suites: Sequence[Suite], progress: Progress) -> list[dict[str, Any]]:
    """Every cell's figures, in the order of the grid; what is on disk is not measured again."""
    store, drafters = CellStore(plan), dict[str, SlotDrafter]()
    target: FrozenTarget | None = None
    figures = []
    for cell in grid(plan, runs, suites):
        if cell in store:
            figures.append(store.read(cell))
            progress.skip(_kind(cell))
            continue
        if target is None:
            target = load_target(plan, runs)
        label = run_path(plan.out, cell.run.name, cell.run.seed).name
        if label not in drafters:
            drafters[label] = cell.run.folder.load_drafter(target)
        shown = f"{cell.suite.name}, {cell.tree}, T {cell.temperature:g}, batch {cell.batch}, {label}"
        with progress.job(_kind(cell), shown):
            figures.append(store.measure(cell, target, drafters[label]))
    return figures


def load_target(plan: Plan, runs: Sequence[Run]) -> FrozenTarget:
    """The target of all runs, for decoding.

    Raises:
        ManifestMismatch: a run was trained for another one.
    """
    first = runs[0]
    target = first.folder.load_target(source=plan.source, dtype=plan.dtype, device=plan.device)
    for run in runs[1:]:
        present = dataclasses.replace(run.manifest, target=target.fingerprint)
        run.manifest.require_same(present, ("target",), f"{run.folder.path} does not fit {first.folder.path}")
    return target


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder; a killed one leaves no lock behind (where the system has file locks).

    Raises:
        ValueError: another process works there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another process works in {folder}; wait for it, or choose another out=") from error
        yield


def _progress(plan: Plan, record: Record, suites: Sequence[Suite]) -> Progress:
    trained = [("train", name) for _ in plan.seeds for name in plan.recipes]
    settings = itertools.product(suites, plan.trees, plan.temperatures, plan.batches, record.runs)
    cells = [(suite.name, tree, batch) for suite, tree, _, batch, _ in settings]
    expected: dict[Hashable, float] = {
        ("train", name): spent.seconds * spent.steps
        for name, spent in record.spent.items()
        if spent.seconds is not None
    }
    return Progress([*trained, *cells], expected)


def _kind(cell: Cell) -> tuple[str, str, int]:
    return cell.suite.name, cell.tree, cell.batch
