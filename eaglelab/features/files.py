"""Files that are whole or not there, whatever ends the process; their digests; errors of a disk in plain words."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import xxhash

UNFINISHED = ".unfinished"
"""Ends the names of files that are being written."""

FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def put(path: Path, content: bytes) -> None:
    """Write aside, force to the disk, rename, force the name to the disk.

    An error leaves nothing behind; a killed process at most the file aside, whose name ends in ``.unfinished``.

    Raises:
        OSError: the disk is full, may not be written to, or failed.
    """
    aside = path.with_name(f".{path.name}.{uuid4().hex[:8]}{UNFINISHED}")
    try:
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync_folder(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_unfinished(folder: Path, names: set[str] | None = None) -> None:
    """Remove what killed processes left of ``names``; None: of any file."""
    for path in folder.glob(f".*{UNFINISHED}"):
        if names is None or path.name[1:].rsplit(".", 2)[0] in names:
            path.unlink(missing_ok=True)


def digest(content: bytes) -> str:
    """xxh3 of 128 bits: finds accidents, at the speed of memory; no proof against a forger."""
    return xxhash.xxh3_128_hexdigest(content)


def digest_of(path: Path) -> str:
    """The same of a file."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**20):
            state.update(block)
    return state.hexdigest()


@contextmanager
def sole_writer(folder: Path, alone: bool) -> Iterator[None]:
    """Hold the folder while writing into it: alone, or beside the other ranks of one job. Ends with the process.

    Raises:
        ValueError: another process writes there.
    """
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to out={folder}; wait for it, or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


@contextmanager
def plain_errors(folder: Path, again: str) -> Iterator[None]:
    """Turn errors of the disk into what to do about them.

    Args:
        again: what continues the work.

    Raises:
        ValueError: the disk is full, or the folder may not be written to.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise ValueError(
                f"no space left for out={folder} ({free_bytes(folder) / 1e6:,.0f} MB free, or a quota is reached). "
                f"Nothing half-written remains; free some space, then {again}"
            ) from error
        if error.errno in _FORBIDDEN:
            raise ValueError(
                f"out={folder} may not be written to ({error.strerror}: {error.filename}). Make it writable or choose "
                f"another folder, then {again}"
            ) from error
        raise


def free_bytes(folder: Path) -> int:
    """Free space of the disk that holds ``folder``, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
