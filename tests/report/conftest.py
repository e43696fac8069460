"""A small comparison of two drafters on a random target, with a tokenizer whose tokens and prompts attack the page."""

from __future__ import annotations

import csv
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eaglelab.comparison.results import cell_row, contrasts, summary_rows
from eaglelab.data.conversations import Conversation
from eaglelab.decoding import DynamicTree
from eaglelab.evaluation import Settings, evaluate, open_sink, read_records, summarize_rounds
from eaglelab.report import write_report
from eaglelab.target import FrozenTarget
from tests.oracles.scripted import Predict, ScriptDrafter, full_logits, noise, tiny_llama
from tests.target.target_tokenizer import tiny_tokenizer

ATTACK = "<script>document.title='attacked'</script>"
TREE = {"name": "dynamic", "nodes": 9, "depth": 4, "width": 3, "budget": 9}
NOISE = {"plain": 2.5, "sharp": 0.0}
FIRST = 7
RUNS = [("plain", 0), ("plain", 1), ("sharp", 0)]


@pytest.fixture(scope="session")
def target() -> FrozenTarget:
    tokenizer = tiny_tokenizer(extra=(ATTACK, "<!--", "</script>", "&amp;", '"', "\\", "<img/src=x>"))
    return FrozenTarget(tiny_llama(len(tokenizer), positions=160), tokenizer)


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory, target: FrozenTarget) -> Path:
    """The comparison's folder, without a report."""
    out = tmp_path_factory.mktemp("comparison")
    cells = [
        cell(out, target, name, seed, suite, batch) for suite in ("gsm8k", "chat & <b>more") for name, seed in RUNS
        for batch in (1, 2)
    ]  # fmt: skip
    for name, seed in RUNS:
        training(out / "runs" / f"{name}-seed{seed}", name)
    rows = [cell_row(one, {}, resamples=200) for one in cells]
    results = {
        "runs": [{"name": name, "seed": seed, "flops": 2.5e15, "real_chain_tau": 1.25} for name, seed in RUNS],
        "rows": rows,
        "summary": summary_rows(cells, resamples=200),
        "contrasts": contrasts(cells, resamples=200),
        "diff": [{"section": "contract", "field": "passes", "values": {"plain": 1, "sharp": 3}}],
        "notes": ["one training seed of sharp"],
    }
    (out / "results.json").write_text(json.dumps(results))
    asked: dict[str, Any] = {"variants": ["plain", "sharp"], "given": {}, "trees": {"dynamic": TREE}, "resamples": 200}
    asked |= {"budget": {"unit": "steps", "value": 20}, "target": {"source": "a & <b>target"}}
    (out / "comparison.json").write_text(json.dumps(asked))
    return out


@pytest.fixture(scope="session")
def reported(tmp_path_factory: pytest.TempPathFactory, measured: Path) -> Path:
    """The comparison's folder, with its report."""
    out = tmp_path_factory.mktemp("reported") / "comparison"
    shutil.copytree(measured, out)
    write_report(out, answers=2)
    return out


@functools.cache
def drafts(target: FrozenTarget, scale: float, seed: int) -> Predict:
    """Scores as the target's with noise, the same for all cells of a run, so that they are computed once."""
    right, wrong = predictions(target), noise(len(target.tokenizer), salt=seed)
    return lambda context: right(context) + scale * wrong(context)


@functools.cache
def predictions(target: FrozenTarget) -> Predict:
    return full_logits(target.model)


def cell(out: Path, target: FrozenTarget, name: str, seed: int, suite: str, batch: int) -> dict[str, Any]:
    folder = out / "cells" / f"{name}-seed{seed}-{len(suite)}-b{batch}"
    folder.mkdir(parents=True)
    texts = ("hello", f"all well {ATTACK}", "a b c", "ten")
    prompts = [Conversation(str(n), ({"role": "user", "content": text},)) for n, text in enumerate(texts)]
    drafter = ScriptDrafter(drafts(target, NOISE[name], seed), FIRST)
    settings = Settings(max_new_tokens=12, ignore_eos=True, warmup=0, batch=batch, progress=False)
    with open_sink(folder / "rounds.parquet") as sink:
        result = evaluate(
            target,
            drafter,
            DynamicTree(3, 4, 9),
            prompts,
            settings,
            encode=lambda messages: [
                FIRST,
                *target.tokenizer.encode(messages[-1]["content"], add_special_tokens=False),
            ],
            on_record=sink.write,
        )
    figures = result.to_dict()
    labels = {"name": name, "variant": "hass", "run": str(out / "runs" / name), "seed": seed, "suite": suite}
    labels |= {"tree": "dynamic", "tree_settings": TREE, "temperature": 0.0, "batch": batch, "max_new_tokens": 12}
    figures["cell"] = labels
    decode_s = figures["seconds"]["decode"]
    figures["telemetry"] = summarize_rounds(read_records(folder / "rounds.parquet"), decode_s=decode_s)
    figures["draft_vocabulary"] = {"reduced": False, "rejected": 3, "misses": 0, "share": None}
    (folder / "cell.json").write_text(json.dumps(figures))
    return figures


def training(folder: Path, name: str) -> None:
    """A run folder's papers: 20 steps, 30 rows each, validated at steps 10 and 20."""
    (folder / "csv" / "version_0").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"variant": "hass", "switches": {"passes": 1, "of": name}}))
    figures = {"optimizer_steps": 20, "supervised_rows": 600, "seconds": 40.0, "drafter_parameters": 1234567}
    if name == "sharp":
        (folder / "store").mkdir()
        with (folder / "store" / "shard").open("wb") as file:
            file.truncate(7 * 2**20)
        figures |= {"supervised_rows": 900, "features": {"source": "store", "path": str(folder / "store")}}
    (folder / "metrics.json").write_text(json.dumps({"training": figures, "comparison": {"peak_memory_mib": 321.0}}))
    with (folder / "csv" / "version_0" / "metrics.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, ["step", "train/supervised_rows", "val/tau"])
        lines.writeheader()
        lines.writerow({"step": 4, "train/supervised_rows": 150})
        lines.writerow({"step": 9, "val/tau": 1.5})
        lines.writerow({"step": 14, "train/supervised_rows": 450})
        lines.writerow({"step": 19, "val/tau": 2.0})
