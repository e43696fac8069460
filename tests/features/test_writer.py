"""Writing a store: killed, interrupted, shared by processes, on a full disk."""

import errno
import fcntl
import os
import re
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaglelab.features import files
from eaglelab.features.contents import Contents, shard_stops
from eaglelab.features.store import FeatureStore
from tests.features.conftest import TAPS, contents_of, packed_rows, prepared


def at_every_write_point(monkeypatch, act) -> None:
    """Call ``act(number)`` before each system call that changes the folder."""
    count = iter(range(10**6))
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def call(*args, real=real):
            act(next(count))
            return real(*args)

        monkeypatch.setattr(os, name, call)


def refusal(writer) -> str | None:
    """What a write says when it cannot be done; None where it can."""
    try:
        writer.write(show_progress=False)
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture
def whole(writer, tmp_path) -> dict[str, bytes]:
    """The files of an uninterrupted store."""
    writer(tmp_path / "whole").write(show_progress=False)
    return contents_of(tmp_path / "whole")


def test_a_store_killed_at_any_moment_continues_to_the_same_bytes(writer, tmp_path, whole, monkeypatch):
    """The folder as a kill leaves it, before every system call that changes it."""
    moments = []

    def keep(number):
        shutil.copytree(tmp_path / "out", tmp_path / f"killed-{number}")
        moments.append(tmp_path / f"killed-{number}")

    with monkeypatch.context() as patched:
        at_every_write_point(patched, keep)
        writer(tmp_path / "out").write(show_progress=False)
    shards = sum(name.endswith(".safetensors") and "rows" not in name for name in whole)
    assert shards >= 4 and len(moments) > 6 * shards
    for number, killed in enumerate(moments):
        finished = sum(path.name.endswith(".xxh128") for path in killed.glob("*.xxh128"))
        done = writer(killed).write(show_progress=False)
        assert contents_of(killed) == whole, f"killed before call {number}"
        assert done.found == finished and done.written == shards - finished  # at most the unfinished one is lost
        FeatureStore(killed).check_all()


def test_a_full_disk_ends_cleanly_wherever_it_is_full(writer, tmp_path, monkeypatch):
    small = prepared(((9, 7), (24,)), val=None)
    writer(tmp_path / "whole", data=small, shard_bytes=1).write(show_progress=False)
    whole = contents_of(tmp_path / "whole")
    for number in range(200):
        out = tmp_path / f"out-{number}"

        def fail(here, number=number):
            if here == number:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            at_every_write_point(patched, fail)
            error = refusal(writer(out, data=small, shard_bytes=1))
        if error is None:
            break
        assert re.search("no space left for out=.*; free some space, then run the same command again", error)
        assert not list(out.glob(".*")), "half-written files"
        assert not (out / "index.json").exists() or contents_of(out) == whole
        writer(out, data=small, shard_bytes=1).write(show_progress=False)
        assert contents_of(out) == whole
    assert number > 20


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.EDQUOT, "no space left for out="),
        (errno.EACCES, r"may not be written to \(.*Make it writable or choose another folder"),
        (errno.EROFS, "may not be written to"),
    ],
)
def test_a_folder_that_refuses_says_what_to_do(writer, tmp_path, monkeypatch, code, told):
    def fail(number):
        raise OSError(code, os.strerror(code), str(tmp_path / "out"))

    at_every_write_point(monkeypatch, fail)
    assert re.search(told, refusal(writer(tmp_path / "out")))
    assert not list((tmp_path / "out").iterdir())


def test_other_errors_of_the_disk_are_not_hidden(writer, tmp_path, monkeypatch):
    def fail(number):
        raise OSError(errno.EIO, "broken")

    at_every_write_point(monkeypatch, fail)
    with pytest.raises(OSError, match="broken"):
        writer(tmp_path / "out").write(show_progress=False)


def test_a_store_that_will_not_fit_is_refused_before_the_work(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1_000)
    with pytest.raises(ValueError, match=r"needs \d+ MB and 0 MB are free; free some space, choose another folder"):
        writer(tmp_path / "out").write(show_progress=False)
    assert not list((tmp_path / "out").glob("train-*"))


def test_an_interrupted_store_keeps_its_finished_shards(writer, tmp_path, whole):
    interrupted = writer(tmp_path / "out")
    compute, calls = interrupted._compute, []

    def twice(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return compute(*args)

    interrupted._compute = twice
    with pytest.raises(KeyboardInterrupt):
        interrupted.write(show_progress=False)
    with pytest.raises(ValueError, match="is unfinished; run its eaglelab cache command again"):
        FeatureStore(tmp_path / "out")
    done = writer(tmp_path / "out").write(show_progress=False)
    assert done.found == 2 and contents_of(tmp_path / "out") == whole


@pytest.mark.parametrize("world_size", [2, 9])
def test_processes_share_the_shards_of_the_same_store(writer, tmp_path, whole, world_size):
    done = [
        writer(tmp_path / "out", rank=rank, world_size=world_size).write(show_progress=False)
        for rank in reversed(range(world_size))
    ]
    assert [one.complete for one in done] == [False] * (world_size - 1) + [True]
    assert sum(one.written for one in done) == done[0].shards
    assert contents_of(tmp_path / "out") == whole


def test_a_store_begun_by_one_process_is_continued_by_two(writer, tmp_path, whole):
    writer(tmp_path / "out", rank=0, world_size=4).write(show_progress=False)
    for rank in range(2):
        writer(tmp_path / "out", rank=rank, world_size=2).write(show_progress=False)
    assert contents_of(tmp_path / "out") == whole


def test_a_damaged_shard_is_written_again(writer, tmp_path, whole):
    out = tmp_path / "whole"
    (out / "train-00001.safetensors").write_bytes(b"damaged")
    done = writer(out).write(show_progress=False)
    assert done.written == 1 and contents_of(out) == whole


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "bfloat16"}, r"contents\.dtype was 'float32' and is 'bfloat16' now"),
        ({"taps": ("final",)}, "tap_norm was 'pre' and is 'post' now"),
        ({"data": prepared(((9,),))}, r"report\.train\.answer_tokens was"),
        ({"data": "other tokens"}, r"splits\.train\.digest was"),
        ({"batch_tokens": 24}, r"batch_tokens was 48 and is 24 now"),
        ({"shard_bytes": 10**9}, "shard_bytes was 20480 and is 1000000000 now"),
    ],
)
def test_a_store_is_not_continued_with_other_settings(writer, tmp_path, whole, changes, named):
    if changes.get("data") == "other tokens":
        data = prepared()
        data.train_rows = packed_rows(((9, 7), (24,), (5, 12), (20,), (6,), (11, 13)), seed=9)
        changes = {"data": data}
    with pytest.raises(ValueError, match=named):
        writer(tmp_path / "whole", **changes).write(show_progress=False)
    assert contents_of(tmp_path / "whole") == whole


def test_a_folder_of_something_else_is_left_alone(writer, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt, no feature store; choose another folder"):
        writer(tmp_path).write(show_progress=False)
    with pytest.raises(ValueError, match="is a file; choose a folder"):
        writer(tmp_path / "notes.txt").write(show_progress=False)
    assert contents_of(tmp_path) == {"notes.txt": b"mine"}


def test_two_writers_do_not_write_one_store(writer, tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process is writing to out="):
        writer(tmp_path).write(show_progress=False)
    os.close(handle)
    assert writer(tmp_path).write(show_progress=False).complete


def test_padding_of_the_passes_is_reported_and_small_where_lengths_are_alike(writer, tmp_path):
    data = prepared(tuple((length,) for length in (4, 20, 5, 19, 4, 20, 5, 19)), val=None)
    together = writer(tmp_path / "a", data=data, shard_bytes=10**9, batch_tokens=40).plan.padding_share
    assert together < 0.05
    assert writer(tmp_path / "b", data=data, shard_bytes=1, batch_tokens=40).plan.padding_share == 0


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 5), st.integers(1, 200))
def test_shards_cover_all_rows_in_order_and_keep_their_size(tokens, width, size):
    stops = shard_stops(tokens, width, size)
    assert stops == sorted(set(stops)) and (stops[-1] if stops else 0) == len(tokens)
    for start, stop in zip([0, *stops], stops):
        filled = sum(tokens[start:stop]) * width
        assert filled <= size or stop - start == 1
        if stop < len(tokens):
            assert filled + tokens[stop] * width > size


def test_contents_that_cannot_be_are_refused(deep_target):
    for arguments, named in (
        ((("final",), "int8", "top_k", 4), "teacher=top_k leaves out the last feature"),
        ((TAPS, "int8", "top_k", 61), "top_k=61 must be from 1 to 60"),
        ((TAPS, "int8", "logits", 4), "teacher='logits' is not one of feature, top_k"),
        ((TAPS, "int3", "feature", 4), "dtype='int3' is not one of"),
    ):
        with pytest.raises(ValueError, match=named):
            Contents.of(deep_target, *arguments)


def test_four_streams_in_int8_with_a_distribution_take_two_and_a_half_times_less_than_bfloat16():
    """At the widths of real targets."""
    wide = {"width": 4096, "vocab_size": 128_256}
    plain = Contents((2, 16, 29, "final"), "bfloat16", **wide).bytes_per_token
    small = Contents((2, 16, 29), "int8", **wide, teacher="top_k", top_k=64).bytes_per_token
    assert plain / small > 2.5
    assert (
        Contents(("final",), "bfloat16", **wide).bytes_per_token
        > 3.5 * Contents(("final",), "int4", **wide).bytes_per_token
    )
