"""A store under a URL: the same rows, each shard once and checked, in a folder of bounded size."""

import http.server
import importlib.util
import itertools
import os
import shutil
import threading
import time

import fsspec
import numpy as np
import pytest
import torch

from eaglelab.data import RowLoader, epoch_order
from eaglelab.features.folders import RemoteFolder, Streaming
from eaglelab.features.store import Ahead, FeatureStore
from tests.features.conftest import prepared

PLAN = ((9, 7), (24,), (5, 12), (20,), (6,), (11, 13), (22,), (18,), (7, 9), (21,), (10,), (8, 8))
LONG = {"data": prepared(plan=PLAN)}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(RemoteFolder, "waits", (0.0,))


@pytest.fixture
def memory(store):
    """Writes a store and copies it to fsspec's memory; gives the local one, the URL and the file system."""
    fs = fsspec.filesystem("memory")

    def make(**options):
        local = store(**options)
        for path in local.path.iterdir():
            fs.pipe_file(f"/bucket/store/{path.name}", path.read_bytes())
        return local, "memory://bucket/store", fs

    yield make
    fs.rm("/bucket", recursive=True)


class Server:
    """Serves a folder over HTTP and counts what it was asked for."""

    def __init__(self, folder):
        self.asked = asked = []

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path.rsplit("/", 1)[-1])
                super().do_GET()

            def log_message(self, *_):
                pass

        handler = lambda *arguments: Handler(*arguments, directory=str(folder))  # noqa: E731
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/store"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def shards(self):
        return [name for name in self.asked if name.startswith("train-")]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def served(store, tmp_path):
    local = store(**LONG)
    server = Server(tmp_path)
    yield local, server
    server.close()


def remote(url, cache, **settings):
    shuffle = settings.pop("shuffle_shards", None)
    return FeatureStore(url, streaming=Streaming(cache, **{"prefetch": 0} | settings), shuffle_shards=shuffle)


def kept(cache):
    """Whole files in the cache, by name."""
    return {path.name: path for path in cache.glob("*/*.safetensors") if not path.name.startswith(".")}


def assert_same_rows(here, there):
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one.tokens_S, other.tokens_S) and one.lengths == other.lengths
        assert one.features.keys() == other.features.keys()
        for name in one.features:
            assert one.features[name].equal(other.features[name])


def test_rows_are_those_of_the_folder_and_shards_come_on_their_first_use(memory, tmp_path):
    local, url, fs = memory()
    opened = remote(url, tmp_path / "cache")
    assert opened.plan == local.plan and opened.manifest == local.manifest
    assert not kept(tmp_path / "cache")
    rows = opened.rows("train")
    assert set(kept(tmp_path / "cache")) == {"train.rows.safetensors"}
    _ = rows[0].features
    assert set(kept(tmp_path / "cache")) == {"train.rows.safetensors", "train-00000.safetensors"}
    for split in ("train", "val"):
        assert_same_rows(opened.rows(split), local.rows(split))
    opened.check_all()
    fs.rm("/bucket/store/train-00000.safetensors")  # it is here by now, also for a process of later
    assert_same_rows(opened.rows("train"), local.rows("train"))
    assert remote(url, tmp_path / "cache").rows("train")[0].features
    assert opened.to_dict()["path"] == url


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_fetches_every_shard_once_and_gives_the_folders_batches(served, tmp_path, workers):
    local, server = served
    opened = remote(server.url, tmp_path / "cache", prefetch=2, shuffle_shards=2)
    same = FeatureStore(local.path, shuffle_shards=2)
    options = {"batch_size": 2, "seed": 4, "row_length": 24}
    batches = RowLoader(opened.rows("train"), **options, num_workers=workers).batches(0)
    for here, there in zip(batches, RowLoader(same.rows("train"), **options).batches(0), strict=True):
        assert here.tokens_BS.equal(there.tokens_BS)
        assert all(here.features[name].equal(there.features[name]) for name in there.features)
    assert sorted(server.shards) == [shard.file for shard in opened.shards("train")]


def test_shards_are_fetched_a_few_at_a_time(served, tmp_path):
    """Without prefetching: after the rows of k groups, the shards of k groups are here and no other."""
    _, server = served
    rows = remote(server.url, tmp_path / "cache", shuffle_shards=2).rows("train")
    assert len(rows.store.shards("train")) >= 5
    groups = rows.shuffle_groups(3, 0)
    loader = RowLoader(rows, batch_size=1, seed=3)
    for done, _ in enumerate(loader.batches(0), start=1):
        begun = int(groups[loader.plan(0)[done - 1][0]]) + 1
        assert len(set(server.shards)) <= 2 * begun


@pytest.mark.parametrize("shuffled", [1, 2, 3, 100])
def test_the_order_is_a_permutation_in_groups_of_whole_shards(store, shuffled):
    opened = FeatureStore(store(**LONG).path, shuffle_shards=shuffled)
    rows = opened.rows("train")
    shard_of = [shard.number for shard in opened.shards("train") for _ in range(shard.start, shard.stop)]
    orders = []
    for epoch in range(3):
        order = list(itertools.chain(*RowLoader(rows, batch_size=1, seed=9).plan(epoch)))
        assert sorted(order) == list(range(len(rows)))
        groups = rows.shuffle_groups(9, epoch)
        for _, members in itertools.groupby(order, key=lambda row: groups[row]):
            shards = {shard_of[row] for row in list(members)}
            assert len(shards) <= shuffled
        runs = [number for number, _ in itertools.groupby(order, key=lambda row: groups[row])]
        assert runs == sorted(set(groups.tolist()))  # one group after the other
        assert RowLoader(FeatureStore(opened.path, shuffle_shards=shuffled).rows("train"), batch_size=1, seed=9).plan(
            epoch
        ) == [[row] for row in order]
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]


def test_a_folder_is_shuffled_as_a_whole_unless_asked(store):
    rows = store(**LONG).rows("train")
    assert rows.shuffle_groups(0, 0) is None
    loader = RowLoader(rows, batch_size=1, seed=5)
    assert [row for (row,) in loader.plan(1)] == epoch_order(5, 1, len(rows)).tolist()
    assert "shuffle" not in loader.state_dict()


def test_resuming_needs_the_same_groups(store):
    path = store(**LONG).path
    loaders = {
        shards: RowLoader(FeatureStore(path, shuffle_shards=shards).rows("train"), batch_size=2, seed=1)
        for shards in (None, 2, 3)
    }
    for saved, resumed in itertools.product(loaders, loaders):
        state = loaders[saved].state_dict()
        if saved == resumed:
            loaders[resumed].load_state_dict(state)
        else:
            with pytest.raises(ValueError, match=r"shuffle is .*features\.shuffle_shards"):
                loaders[resumed].load_state_dict(state)


def test_the_cache_stays_in_its_bounds_and_gives_up_the_longest_unused(memory, tmp_path):
    local, url, _ = memory(**LONG)
    files = [shard.file for shard in local.shards("train")]
    sizes = [(local.path / name).stat().st_size for name in files]
    room = sum(sizes[:3]) + max(sizes) // 2 + (local.path / "train.rows.safetensors").stat().st_size
    opened = remote(url, tmp_path / "cache", cache_gib=room / 2**30, shuffle_shards=2)
    rows = opened.rows("train")
    first = {shard.file: shard.start for shard in opened.shards("train")}
    used = []

    def use(name):
        before = rows[first[name]].features["final"]
        used.append(name)
        time.sleep(0.02)  # file systems tell times in steps
        held = kept(tmp_path / "cache")
        assert sum(path.stat().st_size for path in held.values()) <= room
        assert name in held and torch.isfinite(before).all()

    for name in files[:3]:
        use(name)
    os.utime(kept(tmp_path / "cache")[files[0]])  # used again, as another process would
    time.sleep(0.02)
    use(files[3])
    assert files[0] in kept(tmp_path / "cache") and files[1] not in kept(tmp_path / "cache")
    for name in [*files[4:], *files]:
        use(name)
    assert_same_rows(rows, local.rows("train"))


def test_a_cache_that_cannot_hold_what_is_read_at_a_time_is_refused(memory, tmp_path):
    _, url, _ = memory(**LONG)
    with pytest.raises(ValueError, match=r"holds less than the 8 shards .* lower features\.shuffle_shards"):
        remote(url, tmp_path / "cache", cache_gib=2**-15)
    with pytest.raises(ValueError, match=r"less than one file of memory://bucket/store"):
        remote(url, tmp_path / "cache", cache_gib=2**-24)
    for wrong in ({"cache_gib": 0}, {"prefetch": -1}, {"shuffle_shards": 0}):
        with pytest.raises(ValueError, match=f"features.{next(iter(wrong))}="):
            remote(url, tmp_path / "cache", **wrong)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
@pytest.mark.parametrize("name", ["train-00001.safetensors", "train.rows.safetensors", "manifest.json", "store.json"])
def test_damage_at_the_other_end_is_told_and_nothing_of_it_is_kept(memory, tmp_path, damage, name):
    _, url, fs = memory()
    content = fs.cat_file(f"/bucket/store/{name}")
    fs.rm(f"/bucket/store/{name}")
    if damage != "missing":
        changed = content[:-3] if damage == "truncated" else content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        fs.pipe_file(f"/bucket/store/{name}", changed)
    says = "holds no feature store" if (name, damage) == ("store.json", "missing") else name
    with pytest.raises(ValueError, match=says):
        assert all(row.features for row in remote(url, tmp_path / "cache").rows("train"))
    assert name not in kept(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/.*unfinished"))
    if name.startswith("train"):  # whole again, the same store goes on
        fs.pipe_file(f"/bucket/store/{name}", content)
        assert all(row.features for row in remote(url, tmp_path / "cache").rows("train"))


def test_a_damaged_copy_is_fetched_again(memory, tmp_path):
    local, url, _ = memory()
    assert remote(url, tmp_path / "cache").rows("train")[0].features
    copy = kept(tmp_path / "cache")["train-00000.safetensors"]
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    assert_same_rows(remote(url, tmp_path / "cache").rows("train"), local.rows("train"))


def test_a_broken_transfer_is_tried_again(memory, tmp_path, monkeypatch):
    local, url, fs = memory()
    get_file, calls = type(fs).get_file, []

    def flaky(self, source, target, **options):
        calls.append(source)
        if len(calls) % 2:
            with open(target, "wb") as file:
                file.write(b"half")
            raise ConnectionResetError("the peer went away")
        return get_file(self, source, target, **options)

    monkeypatch.setattr(type(fs), "get_file", flaky)
    assert_same_rows(remote(url, tmp_path / "cache").rows("train"), local.rows("train"))
    monkeypatch.setattr(RemoteFolder, "waits", ())
    with pytest.raises(ValueError, match=r"cannot be read \(ConnectionResetError: the peer went away\)"):
        remote(url, tmp_path / "other").rows("train")
    assert not list((tmp_path / "other").glob("*/*unfinished")) and not kept(tmp_path / "other")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("xyz://bucket/store", "Protocol not known: xyz; give a folder, or a URL such as s3://bucket/store"),
        ("http://127.0.0.1:9/store", r"cannot be read \(.*try again when http://127.0.0.1:9/store can be reached"),
        ("memory://nowhere", "memory://nowhere holds no feature store"),
        pytest.param(
            "s3://bucket/store",
            "needs another package: Install s3fs",
            marks=pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed"),
        ),
    ],
)
def test_what_cannot_be_reached_is_told(url, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        remote(url, tmp_path)


def test_a_file_outside_of_the_store_is_never_written(memory, tmp_path):
    _, url, _ = memory()
    folder = remote(url, tmp_path / "cache")._folder
    with pytest.raises(ValueError, match="no plain name"), folder.held("../../evil.safetensors", {"bytes": 1}):
        pass
    assert not (tmp_path / "evil.safetensors").exists()


def test_shards_are_fetched_ahead_and_no_further(store):
    """At most ``prefetch`` shards before their first use; the thread waits in between and ends when told."""
    opened = store(**LONG)

    class Recorder:
        streaming = Streaming(prefetch=2)

        def __init__(self):
            self.fetched = []

        def fetch(self, shard):
            self.fetched.append(shard.file)
            if shard.number == 1:
                raise ValueError("damaged")  # who reads it is told

    def waited_for(count):
        until = time.monotonic() + 20
        while len(recorder.fetched) < count and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        return recorder.fetched

    recorder, shards = Recorder(), opened.shards("train")
    uses = [(shard, 3 * number) for number, shard in enumerate(shards)]
    with Ahead(uses, recorder) as ahead:
        assert waited_for(3) == [shard.file for shard in shards[:3]]  # the first one is wanted at once
        ahead.reached(2)
        assert waited_for(3) == [shard.file for shard in shards[:3]]
        ahead.reached(3)
        assert waited_for(4) == [shard.file for shard in shards[:4]]
    assert not ahead._thread.is_alive()


def test_training_code_that_stops_early_stops_fetching(served, tmp_path):
    _, server = served
    rows = remote(server.url, tmp_path / "cache", prefetch=1, shuffle_shards=1).rows("train")
    batches = RowLoader(rows, batch_size=1, seed=0).batches(0)
    next(batches)
    assert any(thread.name == "eaglelab-prefetch" for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name == "eaglelab-prefetch" for thread in threading.enumerate())


def test_a_store_behind_a_file_url_is_cached_too(store, tmp_path):
    local = store()
    opened = remote(f"file://{local.path}", tmp_path / "cache")
    assert_same_rows(opened.rows("train"), local.rows("train"))
    shutil.rmtree(local.path)
    assert opened.rows("train")[0].features
