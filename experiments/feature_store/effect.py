"""python experiments/feature_store/effect.py --work DIR

What each way of keeping features costs: bytes per token, time to write and read, and the drafter that comes out.

The bundled target is run once, into a float32 store; every other store is encoded from that one, so its write speed is
that of encoding and disk alone. Then one training per store, same seed, same batches, and held-out prompts decoded with
its drafter. What has a result in results/ already is skipped; `--report` only prints the table.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

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


def convert(base: Path, out: Path, variant: str, dtype: str, top_k: int | None) -> float:
    """Write another store of the same rows; returns the seconds."""
    from eaglelab.features.contents import Contents
    from eaglelab.features.data import StoreDataModule
    from eaglelab.features.store import FeatureStore
    from eaglelab.features.writer import StoreWriter
    from eaglelab.target import FINAL, FrozenTarget
    from eaglelab.variants import VARIANTS

    store = FeatureStore(base)
    target = FrozenTarget.load("bundled")
    taps = VARIANTS[variant].taps_for(target)

    class FromStore(StoreWriter):
        def _compute(self, shard, bar):
            rows = self.rows[shard.split]
            streams = {}
            for index in range(shard.start, shard.stop):
                for key, part in rows[index].features.items():
                    streams.setdefault(FINAL if key == FINAL else int(key), []).append(part)
            import torch

            whole = {tap: torch.cat(parts) for tap, parts in streams.items()}
            return self.plan.contents.encode(whole, target.lm_head)

    settings = {"batch_size": 1, "num_workers": 0}
    data = StoreDataModule(store, supervise=store.plan.data["supervise"], seed=0, settings=settings)
    data.setup()
    for rows in (data.train_rows, data.val_rows):
        for row in rows:  # into the page cache, so that only writing is timed
            del row
    contents = Contents.of(target, taps, dtype, "top_k" if top_k else "feature", top_k or 0)
    writer = FromStore(target, data, dict(store.plan.data), taps, contents, out)
    return writer.write(show_progress=False).seconds


def read_speed(path: Path, variant: str) -> dict[str, float]:
    """Of batches of 4 rows in random order, collated and decoded: the first pass checks digests."""
    from eaglelab.features.data import StoreDataModule
    from eaglelab.features.store import FeatureStore, StoreFeatures
    from eaglelab.target import HeadOnlyTarget
    from eaglelab.variants import VARIANTS

    target = HeadOnlyTarget.load("bundled")
    taps = VARIANTS[variant].taps_for(target)
    store = FeatureStore(path)
    store.require(target, taps)
    data = StoreDataModule(
        store, supervise=store.plan.data["supervise"], seed=0, settings={"batch_size": 4, "num_workers": 0}
    )
    data.setup()
    source = StoreFeatures(store, target)
    tokens = len(data.train_rows.tokens_T)
    seconds = []
    for epoch in range(4):
        began = time.perf_counter()
        for batch in data.train_dataloader().batches(epoch):
            source.of(batch, taps)
        seconds.append(time.perf_counter() - began)
    stored = tokens * store.plan.contents.bytes_per_token
    return {
        "first_pass": stored / seconds[0],
        "later_passes": stored / float(np.median(seconds[1:])),
        "tokens_per_second": tokens / float(np.median(seconds[1:])),
    }


def exact_tau(run: Path, base: Path) -> float:
    """Simulated tau on the float32 features of the validation rows, whatever the drafter was trained on."""
    from eaglelab.features.data import StoreDataModule
    from eaglelab.features.store import FeatureStore, StoreFeatures
    from eaglelab.target import HeadOnlyTarget
    from eaglelab.training import RunFolder
    from eaglelab.variants import ChainSimulation, View

    folder, store = RunFolder(run), FeatureStore(base)
    target = HeadOnlyTarget.load("bundled")
    taps = folder.manifest().taps
    store.require(target, taps)
    data = StoreDataModule(
        store, supervise=store.plan.data["supervise"], seed=0, settings={"batch_size": 4, "num_workers": 0}
    )
    data.setup()
    network, chain = folder.load_network(), ChainSimulation(5)
    for batch in data.val_dataloader():
        chain.update(network, View.of(batch, target, taps, StoreFeatures(store, target)))
    return float(chain.compute()["tau"])


def losses(run: Path) -> list[float]:
    """The logged training losses."""
    import csv

    (log,) = run.glob("csv/version_0/metrics.csv")
    with log.open(newline="") as file:
        return [float(line["train/loss"]) for line in csv.DictReader(file) if line["train/loss"]]


def study(variant: str, name: str, work: Path, base: Path, features: list[str], figures: dict) -> None:
    result, run = RESULTS / f"{variant}-{name}.json", work / f"run-{variant}-{name}"
    common = ["trainer.val_check_interval=100", "trainer.log_every_n_steps=5", "logger=csv"]
    if not (run / "metrics.json").exists():
        eaglelab("train", *TRAININGS[variant], *common, *features, f"hydra.run.dir={run}")
    if not list(run.glob("evaluations/*.json")):
        eaglelab("evaluate", f"run={run}", *DECODING)
    metrics = json.loads((run / "metrics.json").read_text())
    figures |= {
        "losses": losses(run),
        "simulated_tau": exact_tau(run, base),
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
            study(variant, "online", work, base, ["features=online", *CONVERSATIONS], {})
        for dtype, top_k, trained in stores:
            name = name_of(dtype, top_k)
            if (RESULTS / f"{variant}-{name}.json").exists() or (only and f"{variant}-{name}" not in only):
                continue
            path = work / f"{variant}-{name}"
            seconds = convert(base, path, variant, dtype, top_k)
            size = sum(file.stat().st_size for file in path.iterdir())
            tokens = tokens_of(path)
            figures = {
                "bytes_per_token": size / tokens,
                "tokens": tokens,
                "write_bytes_per_second": size / seconds,
                "read_bytes_per_second": read_speed(path, variant),
            }
            if trained:
                study(variant, name, work, base, ["features=store", f"features.path={path}"], figures)
            else:
                (RESULTS / f"{variant}-{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def tokens_of(path: Path) -> int:
    report = json.loads((path / "store.json").read_text())["report"]
    return sum(part["tokens"] for part in report.values())


def report() -> None:
    print(
        "| variant | store | bytes/token | of bfloat16 | write MB/s | read MB/s | last losses | simulated tau | tau "
        "| 95 % interval |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for variant, stores in STORES.items():
        plain = None
        for name in ["online", *(name_of(*one[:2]) for one in stores)]:
            path = RESULTS / f"{variant}-{name}.json"
            if not path.exists():
                continue
            one = json.loads(path.read_text())
            size = one.get("bytes_per_token")
            plain = plain or size
            cells = ["", "", "", ""]
            if size:
                read = one["read_bytes_per_second"]["later_passes"]
                write = one["write_bytes_per_second"]
                cells = [f"{size:,.0f}", f"1/{plain / size:.2f}", f"{write / 1e6:,.0f}", f"{read / 1e6:,.0f}"]
            drafter = ["not trained", "", "", ""]
            if "tau" in one:
                low, high = one["tau_interval"]
                loss = f"{np.mean(one['losses'][-10:]):.3f}"
                drafter = [loss, f"{one['simulated_tau']:.2f}", f"{one['tau']:.2f}", f"{low:.2f} to {high:.2f}"]
            print(f"| {variant} | {name} | {' | '.join(cells + drafter)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("outputs/feature_store"))
    parser.add_argument("--only", nargs="*", default=[], help="stores to try, such as eagle3-int8")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if not arguments.report:
        run_all(arguments.work, arguments.only)
    report()


if __name__ == "__main__":
    main()
