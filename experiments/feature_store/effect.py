"""python experiments/feature_store/effect.py --work DIR

What each way of keeping features costs: bytes per token, time to write and read, and the drafter that comes out.

The bundled target is run once, into a float32 store; every other store is encoded from that one. Then one training per
store, same seed, same batches, and held-out prompts decoded with its drafter; what has a result in results/ already is
skipped. `--speeds` times reading, encoding and writing, in CPU seconds because the machine is shared.
`--report` prints the tables.
"""

import argparse
import functools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from eaglelab.features.contents import Contents
from eaglelab.features.data import StoreDataModule
from eaglelab.features.store import FeatureStore, StoreFeatures
from eaglelab.features.writer import StoreWriter
from eaglelab.target import FINAL, FrozenTarget, HeadOnlyTarget, default_taps
from eaglelab.training import RunFolder
from eaglelab.variants import VARIANTS, ChainSimulation, OptimConfig, View

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CONVERSATIONS = ["data.limit=700", "data.val_limit=64"]
DECODING = ["tree=chain", "limit=40", "batch=20", "max_new_tokens=64"]
TRAININGS = {
    "eagle3": ["variant=eagle3", "variant.steps=3", "trainer.max_steps=200"],
    "eagle": ["variant=eagle", "trainer.max_steps=300"],
}
# (dtype, stored tokens of the distribution that replaces the last feature, whether a drafter is trained on it)
STORES = {
    "eagle3": [
        ("bfloat16", None, True),
        ("float8", None, False),
        ("int8", None, True),
        ("int4", None, True),
        ("bfloat16", 16, False),
        ("int8", 6, True),
        ("int4", 16, True),
    ],
    "eagle": [("bfloat16", None, True), ("float8", None, False), ("int8", None, True), ("int4", None, True)],
}


def eaglelab(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "eaglelab.cli.main", *arguments], check=True)


def name_of(dtype: str, top_k: int | None) -> str:
    return dtype + (f"-top{top_k}" if top_k else "")


def base_store(work: Path) -> Path:
    """Everything that both variants read, in float32."""
    path = work / "float32"
    if not (path / "index.json").exists():
        eaglelab("cache", "variant=eagle3", "dtype=float32", f"out={path}", *CONVERSATIONS)
    return path


@functools.cache
def target_of(source: str) -> FrozenTarget:
    return FrozenTarget.load(source)


class FromStore(StoreWriter):
    """Encodes rows of another store instead of running the target."""

    def _compute(self, shard, bar):
        streams = {}
        for index in range(shard.start, shard.stop):
            for key, part in self.rows[shard.split][index].features.items():
                streams.setdefault(FINAL if key == FINAL else int(key), []).append(part)
        whole = {tap: torch.cat(parts) for tap, parts in streams.items()}
        return self.plan.contents.encode(whole, self.target.lm_head)


def convert(base: Path, out: Path, variant: str, dtype: str, top_k: int | None, source: str = "bundled") -> float:
    """Write another store of the same rows; returns the seconds of CPU time."""
    target = target_of(source)
    taps = VARIANTS[variant].taps_for(target)
    store, data = opened(base, target, default_taps(target.num_layers))
    for rows in (data.train_rows, data.val_rows):
        rows[0], rows[len(rows) - 1]  # digests are not what is timed
    contents = Contents.of(target, taps, dtype, "top_k" if top_k else "feature", top_k or 0)
    writer = FromStore(target, data, dict(store.plan.data), taps, contents, out)
    began = time.process_time()
    writer.write(show_progress=False)
    return time.process_time() - began


def read_speed(path: Path, variant: str, source: str) -> float:
    """Stored bytes per second of CPU time: batches of 4 rows in random order, collated and decoded."""
    target = target_of(source)
    taps = VARIANTS[variant].taps_for(target)
    store, data = opened(path, target, taps)
    features = StoreFeatures(store, target)
    seconds = []
    for epoch in range(4):  # digests are checked in the first
        began = time.process_time()
        for batch in data.train_dataloader().batches(epoch):
            features.of(batch, taps)
        seconds.append(time.process_time() - began)
    return len(data.train_rows.tokens_T) * store.plan.contents.bytes_per_token / float(np.median(seconds[1:]))


def opened(path: Path, target, taps) -> tuple[FeatureStore, StoreDataModule]:
    store = FeatureStore(path)
    store.require(target, taps)
    settings = {"batch_size": 4, "num_workers": 0}
    data = StoreDataModule(store, supervise=store.plan.data["supervise"], seed=0, settings=settings)
    data.setup()
    return store, data


def speeds(work: Path, source: str) -> None:
    """Measure writing and reading of every store, one after the other. ``work/float32`` must be there."""
    figures = {}
    for variant, stores in STORES.items():
        for dtype, top_k, _ in stores:
            name = f"{variant}-{name_of(dtype, top_k)}"
            shutil.rmtree(work / "again", ignore_errors=True)
            seconds = convert(work / "float32", work / "again", variant, dtype, top_k, source)
            size = sum(file.stat().st_size for file in (work / "again").iterdir())
            figures[name] = {
                "bytes_per_token": size / tokens_of(work / "again"),
                "write": size / seconds,
                "read": read_speed(work / "again", variant, source),
            }
    (RESULTS / f"speeds-{Path(source).stem}.json").write_text(json.dumps(figures, indent=1) + "\n")


@torch.no_grad()
def on_exact_features(run: Path, base: Path, variant: str) -> dict[str, float]:
    """Loss and simulated tau on the float32 features of the validation rows, whatever the drafter was trained on."""
    folder = RunFolder(run)
    target = HeadOnlyTarget.load("bundled")
    taps = folder.manifest().taps
    store, data = opened(base, target, taps)
    source = StoreFeatures(store, target)
    settings = {"eagle": {"noise": "none"}, "eagle3": {"steps": 3}}[variant]
    module = VARIANTS[variant](target, OptimConfig(lr=1e-3), source=source, **settings)
    module.network.load_state_dict(folder.load_network().state_dict())
    chain, total, rows = ChainSimulation(5), 0.0, 0
    for batch in data.val_dataloader():
        view = View.of(batch, target, taps, source)
        chain.update(module.network, view)
        total += sum(float(one.loss) for one in module.passes(view)) * batch.supervised
        rows += batch.supervised
    return {"exact_loss": total / rows, "simulated_tau": float(chain.compute()["tau"])}


def study(variant: str, name: str, work: Path, base: Path, features: list[str]) -> None:
    result, run = RESULTS / f"{variant}-{name}.json", work / f"run-{variant}-{name}"
    common = ["trainer.val_check_interval=100", "trainer.log_every_n_steps=5", "logger=csv"]
    if not (run / "metrics.json").exists():
        eaglelab("train", *TRAININGS[variant], *common, *features, f"hydra.run.dir={run}")
    if not list(run.glob("evaluations/*.json")):
        eaglelab("evaluate", f"run={run}", *DECODING)
    metrics = json.loads((run / "metrics.json").read_text())
    figures = {
        **on_exact_features(run, base, variant),
        "tau": metrics["tau"],
        "tau_interval": metrics["tau_interval"],
        "identical": metrics["identical"],
        "seconds": metrics["training"]["seconds"],
    }
    result.write_text(json.dumps(figures, indent=1) + "\n")


def run_all(work: Path, only: list[str]) -> None:
    RESULTS.mkdir(exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    base = base_store(work)
    for variant, stores in STORES.items():
        if not (RESULTS / f"{variant}-online.json").exists():
            study(variant, "online", work, base, ["features=online", *CONVERSATIONS])
        for dtype, top_k, trained in stores:
            name = name_of(dtype, top_k)
            if (RESULTS / f"{variant}-{name}.json").exists() or (only and f"{variant}-{name}" not in only):
                continue
            path = work / f"{variant}-{name}"
            if trained:
                convert(base, path, variant, dtype, top_k)
                study(variant, name, work, base, ["features=store", f"features.path={path}"])


def tokens_of(path: Path) -> int:
    report = json.loads((path / "store.json").read_text())["report"]
    return sum(part["tokens"] for part in report.values())


def report() -> None:
    """Sizes and speeds, then what comes out of training."""
    for path in sorted(RESULTS.glob("speeds-*.json")):
        found = json.loads(path.read_text())
        print(f"{path.stem.removeprefix('speeds-')}\n")
        print("| variant | store | bytes/token | bfloat16 / this | write MB/s | read MB/s |\n|---|---|---|---|---|---|")
        for name, one in found.items():
            variant, store = name.split("-", 1)
            plain = found[f"{variant}-bfloat16"]["bytes_per_token"] / one["bytes_per_token"]
            speed = " | ".join(f"{one[key] / 1e6:,.0f}" for key in ("write", "read"))
            print(f"| {variant} | {store} | {one['bytes_per_token']:,.0f} | {plain:.2f} | {speed} |")
        print()
    print("| variant | features | loss | simulated tau | tau | 95 % interval |\n|---|---|---|---|---|---|")
    for variant, stores in STORES.items():
        for name in ["online", *(name_of(*one[:2]) for one in stores)]:
            path = RESULTS / f"{variant}-{name}.json"
            if path.exists():
                one = json.loads(path.read_text())
                low, high = one["tau_interval"]
                print(
                    f"| {variant} | {name} | {one['exact_loss']:.3f} | {one['simulated_tau']:.3f} | {one['tau']:.2f} "
                    f"| {low:.2f} to {high:.2f} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("outputs/feature_store"))
    parser.add_argument("--only", nargs="*", default=[], help="stores to try, such as eagle3-int8")
    parser.add_argument("--speeds", action="store_true", help="measure writing and reading alone")
    parser.add_argument("--target", default="bundled", help="whose stores --speeds measures")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if arguments.speeds:
        speeds(arguments.work, arguments.target)
    elif not arguments.report:
        run_all(arguments.work, arguments.only)
    report()


if __name__ == "__main__":
    main()
