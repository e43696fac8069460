"""``eaglelab cache``, ``eaglelab cache verify`` and training from what they left."""

import json

import pytest
from safetensors.torch import load_file, save_file

from eaglelab.features import files
from eaglelab.features.folders import RemoteFolder
from tests.cli.conftest import run, run_fresh
from tests.features.test_streaming import Server

TINY = ["data.limit=12", "data.val_limit=3", "shard_mib=4"]
STEPS = ["trainer.max_steps=2", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1", "data.batch_size=1"]


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A folder with a store of the bundled data, and what the command printed."""
    folder = tmp_path_factory.mktemp("cache")
    done = run_fresh("cache", "variant=eagle3", "dtype=float32", "out=store", *TINY, cwd=folder)
    return folder, done


def test_a_store_is_written_and_says_what_comes_next(cached):
    folder, done = cached
    assert "streams 2, 6, 9, final in float32, 3,072 bytes/token" in done.stdout
    assert "shards written, 0 were there" in done.stdout and "tokens/s" in done.stdout
    assert "next: eaglelab train variant=eagle3 features=store features.path=store" in done.stdout
    assert (folder / "store" / "index.json").is_file()


def test_the_same_command_again_finds_everything(cached):
    folder, _ = cached
    before = {path: path.read_bytes() for path in (folder / "store").iterdir()}
    again = run("cache", "variant=eagle3", "dtype=float32", "out=store", *TINY, cwd=folder)
    assert "0 shards written" in again.stdout
    assert before == {path: path.read_bytes() for path in (folder / "store").iterdir()}


def test_training_from_the_store_equals_training_online(cached, tmp_path):
    folder, _ = cached
    online = TINY[:2]
    for name, features in (("online", online), ("store", ["features=store", f"features.path={folder / 'store'}"])):
        run("train", "variant=hass", *STEPS, *features, f"hydra.run.dir={name}", cwd=tmp_path)
    here, there = (
        json.loads((tmp_path / name / "metrics.json").read_text())["training"] for name in ("online", "store")
    )
    assert here["final"].keys() == there["final"].keys()
    for name, value in here["final"].items():
        if "seconds" not in name:
            assert there["final"][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert here["data"] == there["data"]
    assert here["features"] == {"source": "online"}
    assert there["features"]["source"] == "store" and there["features"]["dtype"] == "float32"


def test_verify_agrees_and_finds_a_change(cached, tmp_path):
    folder, _ = cached
    done = run("cache", "verify", f"store={folder / 'store'}", "rows=3", cwd=tmp_path)
    assert "every file is as it was written; 3 rows" in done.stdout and "within rounding" in done.stdout
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in (folder / "store").iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    index = json.loads((changed / "index.json").read_text())
    for name in [name for name in index["files"] if name.endswith(".safetensors") and "rows" not in name]:
        tensors = load_file(changed / name)
        save_file({key: part.roll(1, 0).contiguous() for key, part in tensors.items()}, changed / name)
        index["files"][name] = {"bytes": (changed / name).stat().st_size, "xxh128": files.digest_of(changed / name)}
    (changed / "index.json").write_text(json.dumps(index))
    done = run("cache", "verify", "store=changed", "rows=3", cwd=tmp_path, check=False)
    assert done.returncode == 1 and "differs from the target in" in done.stderr


def test_damage_is_told_when_training_begins_to_read(cached, tmp_path):
    folder, _ = cached
    for path in (folder / "store").iterdir():
        content = bytearray(path.read_bytes())
        if path.name == "train-00000.safetensors":
            content[-5] ^= 4
        (tmp_path / path.name).write_bytes(content)
    done = run("train", "features=store", f"features.path={tmp_path}", *STEPS, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "train-00000.safetensors is damaged" in done.stderr and "eaglelab cache command" in done.stderr


def test_a_store_under_a_url_is_verified_and_trained_from(cached, tmp_path, monkeypatch):
    """The losses are those of the folder, read in the same groups of shards."""
    folder, _ = cached
    server, cache = Server(folder), tmp_path / "kept"
    try:
        done = run("cache", "verify", f"store={server.url}", f"cache={cache}", "rows=3", cwd=tmp_path)
        assert f"{server.url}: every file is as it was written; 3 rows" in done.stdout
        asked = len(server.shards)
        for name, path in (("url", server.url), ("folder", folder / "store")):
            features = ["features=store", f"features.path={path}", f"features.cache={cache}"]
            shuffled = "features.shuffle_shards=1"
            run("train", "variant=hass", *STEPS, *features, shuffled, f"hydra.run.dir={name}", cwd=tmp_path)
        assert len(server.shards) == asked > 0  # all of them were fetched before
    finally:
        server.close()
    there, here = (json.loads((tmp_path / name / "metrics.json").read_text())["training"] for name in ("url", "folder"))
    assert there["features"]["path"] == server.url
    same = {name: value for name, value in here["final"].items() if "seconds" not in name}
    assert same.items() <= there["final"].items()
    monkeypatch.setattr(RemoteFolder, "waits", ())
    gone = run("cache", "verify", f"store={server.url}", f"cache={tmp_path}", cwd=tmp_path, check=False)
    assert gone.returncode == 1 and "Traceback" not in gone.stderr
    assert f"try again when {server.url} can be reached" in gone.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dtype=int3", "out=new"], "dtype='int3' is not one of"),
        (["teacher=top_k", "out=new"], "this variant reads and regresses"),
        (["variant=eagle3", "teacher=top_k", "top_k=0", "out=new"], "top_k=0 must be from 1 to 2047"),
        (["shard_mib=0", "out=new"], "shard_mib=0 must be more than 0"),
        (
            ["variant=eagle3", "dtype=bfloat16", "out=store", *TINY],
            "contents.dtype was 'float32' and is 'bfloat16' now",
        ),
        (["variant=eagle3", "variant.taps=[]", "out=new"], "variant.taps=[] names no stream"),
        (["verify", "store=nowhere"], "nowhere holds no feature store; give the out= of eaglelab cache"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_of_a_cache_are_told(cached, arguments, told):
    folder, _ = cached
    done = run("cache", *arguments, cwd=folder, check=False)
    assert done.returncode == 1 and told in done.stderr
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["features.path=nowhere"], "nowhere holds no feature store"),
        (["features.path=store", "data.max_length=256"], "data.max_length=256 but the feature store"),
        (["features.path=store", "data.path=chats.jsonl"], "data.path=chats.jsonl: the rows come from"),
        (["features.path=store", "variant.supervise=source"], "variant.supervise=source but the feature store"),
        (
            ["features.path=store", "target.dtype=bfloat16", "trainer.precision=bf16-mixed"],
            "field dtype_policy.target|field feature_dtype",
        ),
        (["features.path=store", "variant=eagle3", "variant.taps=[1,6,9]"], "field taps was recorded as [2, 6, 9]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_store_that_does_not_fit_is_refused(cached, arguments, told):
    folder, _ = cached
    done = run("train", "features=store", *arguments, *STEPS, "hydra.run.dir=refused", cwd=folder, check=False)
    assert done.returncode == 1 and any(one in done.stderr for one in told.split("|"))
    assert not (folder / "refused" / "manifest.json").exists()


def test_processes_of_torchrun_share_the_shards(cached, tmp_path, monkeypatch):
    folder, _ = cached
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        done = run("cache", "variant=eagle3", "dtype=float32", "out=shared", *TINY, cwd=tmp_path)
        assert f"process {rank} of 2: " in done.stdout
    assert {p.name: p.read_bytes() for p in (tmp_path / "shared").iterdir()} == {
        p.name: p.read_bytes() for p in (folder / "store").iterdir()
    }


def test_an_interrupt_says_how_to_continue(cached, tmp_path, monkeypatch):
    from eaglelab.features.writer import StoreWriter

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(StoreWriter, "_compute", interrupted)
    done = run("cache", "out=new", *TINY, cwd=tmp_path, check=False)
    assert done.returncode == 130 and "finished shards stay. Run the same command again" in done.stderr
    assert not list((tmp_path / "new").glob(".*"))
