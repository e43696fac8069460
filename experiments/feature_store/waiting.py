"""python experiments/feature_store/waiting.py --store DIR

Does reading starve a training loop? EAGLE-1, whose step is the shortest, trained online and from a store in turn: the
share of the time that goes into getting the next batch, and into its features (running the target, or decoding).

--store is a store of the bundled data; its own rows are trained on either way. Writes results/waiting.json.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import lightning as L
import torch

from eaglelab.features.data import StoreDataModule
from eaglelab.features.source import OnlineFeatures
from eaglelab.features.store import FeatureStore, StoreFeatures
from eaglelab.target import FrozenTarget
from eaglelab.variants import VARIANTS, OptimConfig

HERE = Path(__file__).parent
WARM_UP = 5


class Clock(L.Callback):
    """Seconds between the end of a step and the start of the next one, and of whole steps, warm-up left out."""

    def __init__(self) -> None:
        self.waited, self.whole = [], []
        self._ended = self._began = 0.0

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_) -> None:
        now = time.perf_counter()
        if self._ended:
            self.waited.append(self._began - self._ended)
            self.whole.append(now - self._ended)
        self._ended = now

    def share_waiting(self) -> float:
        return sum(self.waited[WARM_UP:]) / sum(self.whole[WARM_UP:])

    def step(self) -> float:
        return statistics.median(self.whole[WARM_UP:])


class Timed:
    """A feature source with a clock."""

    def __init__(self, source) -> None:
        self.source, self.seconds, self.has_last_feature = source, [], source.has_last_feature

    def of(self, batch, taps):
        began = time.perf_counter()
        features = self.source.of(batch, taps)
        self.seconds.append(time.perf_counter() - began)
        return features


class NoFeatures:
    def read(self, *_) -> dict:
        return {}


class RowsAlone(StoreDataModule):
    """The store's rows without their features: what online training reads."""

    def setup(self, stage=None) -> None:
        super().setup(stage)
        for rows in self._splits:
            rows.store = NoFeatures()


def train(target: FrozenTarget, path: Path, variant: str, kind: str, batch: int, steps: int) -> dict[str, float]:
    store = FeatureStore(path)
    torch.manual_seed(0)
    module_type = VARIANTS[variant]
    source = Timed(OnlineFeatures(target) if kind == "online" else StoreFeatures(store, target))
    data_type = RowsAlone if kind == "online" else StoreDataModule
    settings = {"batch_size": batch, "num_workers": 0}
    data = data_type(store, supervise=store.plan.data["supervise"], seed=0, settings=settings)
    data.setup()
    counts = lambda: data.answer_counts(target.vocab_size)  # noqa: E731
    module = module_type(target, OptimConfig(lr=1e-3), seed=0, answer_counts=counts, source=source)
    if kind != "online":
        store.require(target, module.taps)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[clock],
    )
    trainer.fit(module, data)
    features = sum(source.seconds[WARM_UP + 1 :]) / sum(clock.whole[WARM_UP:])
    return {"step_seconds": clock.step(), "waiting": clock.share_waiting(), "features": features}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="a store with the last feature")
    parser.add_argument("--variant", default="eagle")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    target = FrozenTarget.load("bundled")
    figures = {"online": [], "store": []}
    for number in range(arguments.rounds):
        for kind in ("online", "store") if number % 2 == 0 else ("store", "online"):
            figures[kind].append(
                train(target, arguments.store, arguments.variant, kind, arguments.batch, arguments.steps)
            )
    dtype = FeatureStore(arguments.store).plan.contents.dtype
    result = {"variant": arguments.variant, "dtype": dtype, "batch": arguments.batch, "runs": figures}
    (HERE / "results" / f"waiting-{arguments.variant}-{dtype}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"| {arguments.variant}, batch {arguments.batch} | s/step | getting the next batch | features |")
    print("|---|---|---|---|")
    for kind, runs in figures.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        name = kind if kind == "online" else f"store, {dtype}"
        print(f"| {name} | {middle['step_seconds']:.3f} | {middle['waiting']:.1%} | {middle['features']:.1%} |")
    ratios = [a["step_seconds"] / b["step_seconds"] for a, b in zip(figures["online"], figures["store"], strict=True)]
    print(f"online / store, step time, round by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
