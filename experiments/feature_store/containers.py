"""python experiments/feature_store/containers.py --work DIR

The same rows of features in three containers: MB/s to write (forced to the disk) and to read rows in random order, from
a cold and a warm page cache, bytes per token, and what is left after a kill, a flipped byte and a truncated file.
Columns marked CPU are per second of CPU time, which other jobs on the machine disturb less.

litdata is no dependency of eaglelab; without it (pip install --target DIR litdata, PYTHONPATH=DIR) its lines are left
out. Writes results/containers.json and prints the table.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from eaglelab.features import files

HERE = Path(__file__).parent
SHARD = 2**26
Row = dict[str, Tensor]
SHAPES = {  # streams, width, tokens per row, rows
    "EAGLE-3, d = 192": (4, 192, 512, 320),
    "EAGLE-1, d = 4096": (1, 4096, 512, 64),
}


def make_rows(shape: str, seed: int = 0) -> Iterator[Row]:
    streams, width, tokens, rows = SHAPES[shape]
    g = torch.Generator().manual_seed(seed)
    for _ in range(rows):
        row = {str(i): torch.randn(tokens, width, generator=g).to(torch.bfloat16) for i in range(streams)}
        yield row | {"tokens": torch.randint(2**15, (tokens,), generator=g, dtype=torch.int32)}


class Safetensors:
    """Shards of whole rows, one tensor per stream, written whole and digested, as eaglelab's store is."""

    def write(self, rows: Iterator[Row], folder: Path) -> None:
        folder.mkdir(parents=True)
        kept: list[Row] = []
        index: list[dict] = []

        def flush() -> None:
            if kept:
                content = save({name: torch.cat([row[name] for row in kept]) for name in kept[0]})
                name = f"{len(index):05d}.safetensors"
                files.put(folder / name, content)
                lengths = [len(row["tokens"]) for row in kept]
                index.append({"file": name, "lengths": lengths, "xxh128": files.digest(content)})
                files.put(folder / "index.json", json.dumps(index).encode())
                kept.clear()

        for row in rows:
            kept.append(row)
            if sum(part.nbytes for one in kept for part in one.values()) >= SHARD:
                flush()
        flush()

    def read(self, folder: Path) -> tuple[int, Callable[[int], Row]]:
        opened: dict[str, object] = {}
        places = []
        for shard in json.loads((folder / "index.json").read_text()):
            start = 0
            for length in shard["lengths"]:
                places.append((shard, start, start + length))
                start += length

        def row(i: int) -> Row:
            shard, start, stop = places[i]
            path = folder / shard["file"]
            if shard["file"] not in opened:
                if files.digest_of(path) != shard["xxh128"]:
                    raise ValueError(f"{path} is damaged")
                opened[shard["file"]] = safe_open(path, framework="pt")
            file = opened[shard["file"]]
            return {name: file.get_slice(name)[start:stop] for name in file.keys()}  # noqa: SIM118

        return len(places), row


class Arrow:
    """One Arrow stream through `datasets`; Arrow has no bfloat16, so tensors are columns of bytes."""

    def write(self, rows: Iterator[Row], folder: Path) -> None:
        import datasets
        from datasets.arrow_writer import ArrowWriter

        folder.mkdir(parents=True)
        first = next(rows)
        features = datasets.Features({name: datasets.Value("binary") for name in first})
        with ArrowWriter(features=features, path=str(folder / "data.arrow"), writer_batch_size=8) as writer:
            for row in itertools.chain([first], rows):
                writer.write({name: part.view(torch.uint8).numpy().tobytes() for name, part in row.items()})
            writer.finalize()
        _sync(folder)

    def read(self, folder: Path) -> tuple[int, Callable[[int], Row]]:
        import datasets

        data = datasets.Dataset.from_file(str(folder / "data.arrow"))

        def row(i: int) -> Row:
            parts = {name: torch.frombuffer(bytearray(part), dtype=torch.uint8) for name, part in data[i].items()}
            tokens = parts.pop("tokens").view(torch.int32)
            return {name: part.view(torch.bfloat16).view(len(tokens), -1) for name, part in parts.items()} | {
                "tokens": tokens
            }

        return len(data), row


class LitData:
    """Chunks of rows, written and read by its own classes in one process."""

    def write(self, rows: Iterator[Row], folder: Path) -> None:
        from litdata.streaming.writer import BinaryWriter

        folder.mkdir(parents=True)
        writer = BinaryWriter(str(folder), chunk_bytes=SHARD)
        for i, row in enumerate(rows):  # its tensors go through numpy, which has no bfloat16
            writer[i] = {name: part.view(torch.int16 if name != "tokens" else part.dtype) for name, part in row.items()}
        writer.done()
        writer.merge()
        _sync(folder)

    def read(self, folder: Path) -> tuple[int, Callable[[int], Row]]:
        from litdata import StreamingDataset

        data = StreamingDataset(str(folder))

        def row(i: int) -> Row:
            return {
                name: part.view(torch.bfloat16 if name != "tokens" else part.dtype) for name, part in data[i].items()
            }

        return len(data), row


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


CONTAINERS = {"safetensors": Safetensors, "Arrow (datasets)": Arrow, "LitData": LitData}


def forget(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read_all(container, folder: Path, seed: int, clock: Callable[[], float]) -> float:
    """Bytes per second of one pass in random order, opening included."""
    began = clock()
    count, row = container.read(folder)
    got = 0
    for i in np.random.default_rng(seed).permutation(count):
        got += sum(part.clone().nbytes for part in row(int(i)).values())  # some containers read on use
    return got / (clock() - began)


def speed(container, shape: str, work: Path, repeats: int) -> dict[str, float]:
    rows = list(make_rows(shape))
    nbytes = sum(part.nbytes for row in rows for part in row.values())
    tokens = sum(len(row["tokens"]) for row in rows)
    writes, cpu_writes, cold, warm = [], [], [], []
    for repeat in range(repeats):
        shutil.rmtree(work, ignore_errors=True)
        began, cpu_began = time.perf_counter(), time.process_time()
        container.write(iter(rows), work)
        writes.append(nbytes / (time.perf_counter() - began))
        cpu_writes.append(nbytes / (time.process_time() - cpu_began))
        forget(work)
        cold.append(read_all(container, work, repeat, time.perf_counter))
        warm.append(read_all(container, work, repeat, time.process_time))
    overhead = size_of(work) / tokens - nbytes / tokens
    return {
        "write": statistics.median(writes),
        "write_cpu": statistics.median(cpu_writes),
        "read_cold": statistics.median(cold),
        "read_warm_cpu": statistics.median(warm),
        "overhead_bytes_per_token": overhead,
    }


def same_bytes_twice(container, shape: str, work: Path) -> bool:
    digests = []
    for _ in range(2):
        shutil.rmtree(work, ignore_errors=True)
        container.write(make_rows(shape), work)
        digests.append({str(p.relative_to(work)): files.digest_of(p) for p in work.rglob("*") if p.is_file()})
    return digests[0] == digests[1]


def killed(container, shape: str, work: Path) -> str:
    """Rows that can be read after a kill in the middle."""
    shutil.rmtree(work, ignore_errors=True)
    half = SHAPES[shape][3] // 2

    def job() -> None:
        def rows() -> Iterator[Row]:
            for number, row in enumerate(make_rows(shape)):
                if number == half:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield row

        container.write(rows(), work)

    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    process.join()
    try:
        count, row = container.read(work)
        for i in range(count):
            row(i)
        return f"{count} of {half}"
    except Exception as error:
        return f"0 of {half} ({type(error).__name__})"


def damaged(container, shape: str, work: Path, damage: str) -> str:
    """What reading every row makes of a flipped byte, or of a file that lost its end."""
    shutil.rmtree(work, ignore_errors=True)
    container.write(make_rows(shape), work)
    file = max((p for p in work.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with file.open("r+b") as stream:
        if damage == "flipped":
            stream.seek(file.stat().st_size // 2)
            byte = stream.read(1)
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte[0] ^ 1]))
        else:
            stream.truncate(file.stat().st_size - 10_000)
    try:
        count, row = container.read(work)
        wrong = sum(
            any(not torch.equal(row(i)[name].view(-1), part.view(-1)) for name, part in true.items())
            for i, true in zip(range(count), make_rows(shape))
        )
        return f"not noticed, {wrong} wrong rows" if wrong else "not noticed"
    except Exception as error:
        return f"noticed ({type(error).__name__})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("outputs/containers"))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = HERE / "results" / "containers.json"
    found.parent.mkdir(exist_ok=True)
    results = json.loads(found.read_text()) if found.exists() else {}
    for name, kind in CONTAINERS.items():
        if name in results:
            continue
        container, work = kind(), arguments.work / name.split()[0]
        try:
            figures = {shape: speed(container, shape, work, arguments.repeats) for shape in SHAPES}
        except ImportError:
            print(f"{name} is not installed here")
            continue
        first = next(iter(SHAPES))
        figures |= {
            "same_bytes": same_bytes_twice(container, first, work),
            "after_kill": killed(container, first, work),
            "flipped_byte": damaged(container, first, work, "flipped"),
            "truncated": damaged(container, first, work, "truncated"),
        }
        results[name] = figures
        shutil.rmtree(work)
        found.write_text(json.dumps(results, indent=1) + "\n")
    for shape in SHAPES:
        print(f"\n| {shape} | write | write, CPU | read, cold | read, warm, CPU | bytes/token beside the numbers |")
        print("|---|---|---|---|---|---|")
        for name, figures in results.items():
            one = figures[shape]
            speeds = " | ".join(
                f"{one[key] / 1e6:,.0f}" for key in ("write", "write_cpu", "read_cold", "read_warm_cpu")
            )
            print(f"| {name} | {speeds} | {one['overhead_bytes_per_token']:.2f} |")
    print(
        "\n| | two writes give the same bytes | rows left of those written before a kill | flipped byte | truncated |"
    )
    print("|---|---|---|---|---|")
    for name, one in results.items():
        same = "yes" if one["same_bytes"] else "no"
        print(f"| {name} | {same} | {one['after_kill']} | {one['flipped_byte']} | {one['truncated']} |")


if __name__ == "__main__":
    main()
