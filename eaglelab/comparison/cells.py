"""Cells: one run, one suite, one tree, one temperature, one batch. Measured once, then kept by what determines them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import eaglelab
from eaglelab.comparison.plan import Plan, sampling_settings
from eaglelab.comparison.trainings import Interrupted
from eaglelab.drafters import SlotDrafter
from eaglelab.evaluation import Settings, Suite, evaluate, open_sink, read_records, summarize_rounds
from eaglelab.evaluation.vocabulary import VocabularyMisses
from eaglelab.target import FeatureManifest, FrozenTarget
from eaglelab.target.fingerprint import weights_digest
from eaglelab.training import RunFolder

FORMAT = 1  # of cell.json


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained drafter that takes part.

    name, seed: in the comparison.
    folder: its run folder, checkpoint included.
    weights: digest of the drafter's tensors.
    """

    name: str
    seed: int
    folder: RunFolder
    manifest: FeatureManifest
    weights: str

    @classmethod
    def of(cls, name: str, seed: int, path: str | Path) -> Run:
        """Read a run folder.

        Raises:
            ValueError: no run there, or a checkpoint that is not its drafter's.
        """
        folder = RunFolder.existing(path)
        return cls(name, seed, folder, folder.manifest(), weights_digest(folder.load_network().state_dict()))

    @property
    def manifest_digest(self) -> str:
        """Of everything in the manifest but the software versions."""
        fields = self.manifest.to_dict()
        del fields["software"]
        return _digest(fields)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One evaluation of the grid."""

    run: Run
    suite: Suite
    tree: str
    temperature: float
    batch: int

    def determined_by(self, plan: Plan) -> dict[str, Any]:
        """All that its figures depend on, the machine apart; a cell on disk with the same values is this one."""
        policy = plan.tree(self.tree)
        return {
            "format": FORMAT,
            "eaglelab": eaglelab.__version__,
            "manifest": self.run.manifest_digest,
            "weights": self.run.weights,
            "suite": self.suite.digest,
            "tree": {"name": "none"} if policy is None else policy.settings(),
            "sampling": sampling_settings(plan.sampling_at(self.temperature)),
            "batch": self.batch,
            "turns": plan.turns,
            "max_new_tokens": plan.max_new_tokens,
            "dtype": plan.dtype,
            "device": plan.device,
        }

    def key(self, plan: Plan) -> str:
        """Its folder's name: readable, and closed by a digest of `determined_by`."""
        short = _digest(self.determined_by(plan))[:12]
        run = f"{self.run.name}-seed{self.run.seed}"
        return f"{run}-{self.suite.name}-{self.tree}-T{self.temperature:g}-b{self.batch}-{short}"

    def labels(self, plan: Plan) -> dict[str, Any]:
        """What the cell is called in tables and in ``cell.json``."""
        policy = plan.tree(self.tree)
        return {
            "name": self.run.name,
            "variant": self.run.manifest.variant,
            "run": str(self.run.folder.path),
            "seed": self.run.seed,
            "suite": self.suite.name,
            "tree": self.tree,
            "tree_settings": {"name": "none"} if policy is None else policy.settings(),
            "temperature": self.temperature,
            "batch": self.batch,
            "max_new_tokens": plan.max_new_tokens,
            "turns": plan.turns,
            "limit": plan.limit,
            "questions": len(self.suite.prompts),
            "manifest": self.run.manifest_digest,
            "weights": self.run.weights,
            "suite_digest": self.suite.digest,
        }


def grid(plan: Plan, runs: Sequence[Run], suites: Sequence[Suite]) -> list[Cell]:
    """Every cell; the runs innermost, so that what is compared is measured close together in time."""
    settings = itertools.product(suites, plan.trees, plan.temperatures, plan.batches)
    return [Cell(run, suite, tree, float(t), batch) for suite, tree, t, batch in settings for run in runs]


class CellStore:
    """``OUT/cells``: one folder per cell, which is there whole or not at all."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.path = plan.out / "cells"

    def folder(self, cell: Cell) -> Path:
        return self.path / cell.key(self.plan)

    def __contains__(self, cell: Cell) -> bool:
        return (self.folder(cell) / "cell.json").is_file()

    def read(self, cell: Cell) -> dict[str, Any]:
        """The content of ``cell.json``, with this comparison's labels.

        Raises:
            ValueError: the file is damaged.
        """
        path = self.folder(cell) / "cell.json"
        try:
            figures = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); remove its folder to measure again") from error
        return figures | {"cell": figures["cell"] | cell.labels(self.plan)}

    def measure(self, cell: Cell, target: FrozenTarget, drafter: SlotDrafter) -> dict[str, Any]:
        """Decode the cell's prompts with the drafter and without, and keep what was measured.

        Raises:
            Interrupted: Ctrl-C; the cell is not kept.
        """
        aside = self.plan.out / "unfinished" / cell.key(self.plan)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        rounds = aside / "rounds.parquet"
        misses = VocabularyMisses.of(drafter)
        with open_sink(rounds) as sink:

            def keep(record: Mapping[str, Any]) -> None:
                misses.add(record)
                sink.write(record)

            figures = self._evaluate(cell, target, drafter, keep)
        decode_s = figures["seconds"]["decode"]
        figures["telemetry"] = summarize_rounds(read_records(rounds), decode_s=decode_s)
        figures["draft_vocabulary"] = misses.to_dict()
        figures["cell"] = cell.labels(self.plan)
        figures["determined_by"] = cell.determined_by(self.plan)
        (aside / "cell.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        folder = self.folder(cell)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(aside, folder)
        return figures

    def _evaluate(
        self, cell: Cell, target: FrozenTarget, drafter: SlotDrafter, keep: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        plan = self.plan
        settings = Settings(
            max_new_tokens=plan.max_new_tokens,
            turns=plan.turns,
            sampling=plan.sampling_at(cell.temperature),
            batch=cell.batch,
            warmup=0,
            progress=False,
        )
        tree, prompts = plan.tree(cell.tree), cell.suite.prompts
        brief = dataclasses.replace(settings, max_new_tokens=min(8, plan.max_new_tokens))
        with contextlib.suppress(ValueError):  # these prompts are too long; others may fit
            if evaluate(target, drafter, tree, prompts[: cell.batch], brief).partial:
                raise Interrupted
        try:
            result = evaluate(target, drafter, tree, prompts, settings, on_record=keep)
        except ValueError as error:
            raise ValueError(f"suite {cell.suite.name}: {error}") from error
        if result.partial:
            raise Interrupted
        return result.to_dict()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
