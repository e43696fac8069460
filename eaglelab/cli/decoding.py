"""Settings that verbs which decode share."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eaglelab.data import Conversation
    from eaglelab.decoding import Sampling, TreePolicy


def sampling_of(config: DictConfig) -> Sampling:
    """The config's sampling settings.

    Raises:
        ValueError: one out of range.
    """
    from eaglelab.decoding import Sampling

    return Sampling(
        temperature=float(config.temperature),
        top_k=config.top_k,
        top_p=float(config.top_p),
        min_p=float(config.min_p),
        repetition_penalty=float(config.repetition_penalty),
        seed=config.seed,
    )


def prompts_of(config: DictConfig) -> tuple[str, Sequence[Conversation]]:
    """Where the config's prompts come from, and the prompts.

    Raises:
        ValueError: both a suite and a file were named, or neither of them can be read.
    """
    from eaglelab.assets import bundled_data
    from eaglelab.evaluation import load_prompts, load_suite

    path = str(config.data.path)
    if config.suite is None:
        return path, load_prompts(path, limit=config.limit)
    if path != bundled_data("eval"):
        raise ValueError(f"suite={config.suite} and data.path={path} both name prompts; give one of the two")
    return str(config.suite), load_suite(str(config.suite), config.limit).prompts


def trees_of(config: DictConfig) -> dict[str, TreePolicy]:
    """Trees by a name that tells their settings.

    Raises:
        ValueError: no trees, one that is no mapping with a name, or settings that a tree does not take.
    """
    from eaglelab.decoding import make_tree

    trees: dict[str, TreePolicy] = {}
    asked = [] if config.trees is None else OmegaConf.to_container(config.trees)
    for one in asked if isinstance(asked, list) else [asked]:
        if not isinstance(one, dict) or "name" not in one:
            raise ValueError(f"trees: {one!r} is no tree; write {{name: dynamic, width: 4, depth: 6, budget: 16}}")
        tree = make_tree(**{str(key): value for key, value in one.items()})
        if tree is None:
            raise ValueError("trees: plain decoding is measured anyway; leave {name: none} out")
        settings = [str(value) for key, value in one.items() if key != "name"]
        trees[" ".join([str(one["name"]), "/".join(settings)]).strip()] = tree
    if not trees:
        raise ValueError("trees=[]: measure at least one")
    return trees


def telemetry_of(config: DictConfig) -> Telemetry:
    """Where the config wants the records of rounds."""
    return Telemetry(config.telemetry, config.wandb)


class Telemetry:
    """Keeps the rounds' records for a summary, and writes them to a file as they come.

    Args:
        path: .jsonl or .parquet; None: no file.
        wandb: log the summary to Weights & Biases when closed.

    Raises:
        ValueError: another suffix, or wandb is not installed.
    """

    def __init__(self, path: str | None, wandb: bool) -> None:
        from eaglelab.evaluation import open_sink
        from eaglelab.training.loggers import require_wandb

        if wandb:
            require_wandb("wandb=true")
        self.asked = path is not None or wandb
        self.take = self._take if self.asked else None
        self._wandb = wandb
        self._records: list[dict[str, Any]] = []
        self._sink = None if path is None else open_sink(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sink is not None:
            self._sink.__exit__(kind, error, traceback)

    def summary(self, decode_s: float) -> dict[str, Any]:
        """Totals of the records (`summarize_rounds`), logged to W&B where that was asked for."""
        from eaglelab.evaluation import log_to_wandb, summarize_rounds
        from eaglelab.training.loggers import wandb_run

        totals = summarize_rounds(self._records, decode_s=decode_s)
        if self._wandb:
            with wandb_run(job_type="evaluate") as run:
                log_to_wandb(totals, run)
        return totals

    def _take(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        if self._sink is not None:
            self._sink.write(record)
