"""Where the files of a store lie: in a folder here, or under a URL from which they are fetched when they are wanted.

What is fetched is kept in a folder of bounded size, the longest unused shard going first, and is checked before it gets
its name: what lies there under a name is whole. Processes of a machine share the folder, under one lock per file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol
from uuid import uuid4

from eaglelab.features import files
from eaglelab.target import cache_folder

log = logging.getLogger(__name__)

Entry = Mapping[str, Any]
"""``bytes`` and ``xxh128`` of a file, from the store's index."""

KEPT = ".safetensors"
"""Ends the names of files that are kept and given up again."""


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How a store under a URL is read.

    Attributes:
        cache: folder for what was fetched; None: below :func:`~eaglelab.target.cache_folder`.
        cache_gib: of all stores that are fetched to that folder.
        prefetch: shards fetched before they are wanted.
    """

    cache: str | Path | None = None
    cache_gib: float = 64.0
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not self.cache_gib > 0:
            raise ValueError(f"features.cache_gib={self.cache_gib} must be above 0: how much of a store is kept here")
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise ValueError(f"features.prefetch={self.prefetch} must be 0 or a number of shards to fetch ahead")


class Folder(Protocol):
    """The files of one store."""

    repair: str
    """What to do about a damaged file."""
    streams: bool
    """Whether files are fetched when they are wanted."""

    def where(self, name: str = "") -> str:
        """For messages."""

    def read(self, name: str) -> bytes | None:
        """A small file; None: it is not there."""

    def require_sizes(self, entries: Mapping[str, Entry]) -> None:
        """Raises ValueError where a file is known to be missing or truncated."""

    def held(self, name: str, entry: Entry) -> Any:
        """A context: the path of a file, checked against its digest, which stays there until the context ends."""


def is_url(path: str | Path) -> bool:
    return "://" in str(path)


def folder_of(path: str | Path, streaming: Streaming) -> Folder:
    """The folder behind a path or a URL.

    Raises:
        ValueError: no such protocol, or its package is not installed.
    """
    return RemoteFolder(str(path), streaming) if is_url(path) else LocalFolder(Path(path))


class LocalFolder:
    """A folder on this machine, or mounted here."""

    repair: str = "run the eaglelab cache command of this store again, which writes damaged shards anew"
    streams = False

    def __init__(self, path: Path) -> None:
        self.path = path

    def where(self, name: str = "") -> str:
        return str(self.path / name)

    def read(self, name: str) -> bytes | None:
        return (self.path / name).read_bytes() if (self.path / name).is_file() else None

    def require_sizes(self, entries: Mapping[str, Entry]) -> None:
        for name, entry in entries.items():
            there = (self.path / name).stat().st_size if (self.path / name).is_file() else None
            if there != int(entry["bytes"]):
                what = "is missing" if there is None else f"has {there:,} bytes instead of {int(entry['bytes']):,}"
                raise ValueError(f"{self.where(name)} {what}; {self.repair}")

    @contextmanager
    def held(self, name: str, entry: Entry) -> Iterator[Path]:
        if files.digest_of(self.path / name) != entry.get("xxh128"):
            raise ValueError(f"{self.where(name)} is damaged (its digest is not the recorded one); {self.repair}")
        yield self.path / name


class RemoteFolder:
    """Objects under a URL of any protocol that fsspec knows.

    Raises:
        ValueError: no such protocol, or its package is not installed.
    """

    repair: str = "copy it there again from the folder that eaglelab cache wrote"
    streams = True
    waits: ClassVar[tuple[float, ...]] = (0.5, 2.0, 8.0)
    """Seconds before another attempt after one that failed."""

    def __init__(self, url: str, streaming: Streaming) -> None:
        self.url = url.rstrip("/")
        self._most = int(streaming.cache_gib * 2**30)
        self.root = Path(streaming.cache) if streaming.cache else cache_folder() / "stores"
        self.kept = self.root / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._checked: set[str] = set()
        self._connected: tuple[int, Any, str] | None = None
        self._connect()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connected": None}

    def where(self, name: str = "") -> str:
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str) -> bytes | None:
        with self._plain_errors(name):
            try:
                return bytes(self._with_patience(lambda fs, path: fs.cat_file(path), name))
            except FileNotFoundError:
                return None

    def require_sizes(self, entries: Mapping[str, Entry]) -> None:
        """Nothing: a store may have more objects than one would ask about; each is checked when it is fetched.

        Raises:
            ValueError: the folder for them cannot hold even the largest.
        """
        largest = max(int(entry["bytes"]) for entry in entries.values())
        if largest > self._most:
            raise ValueError(
                f"features.cache_gib={self._most / 2**30:g} is less than one file of {self.url} ({largest / 2**30:.3g} "
                "GiB); raise features.cache_gib"
            )

    @contextmanager
    def held(self, name: str, entry: Entry) -> Iterator[Path]:
        if Path(name).name != name:
            raise ValueError(f"{self.where()} names a file {name!r}, which is no plain name; cache the store again")
        with self._lock(name):
            yield self._fetched(name, entry)

    def _fetched(self, name: str, entry: Entry) -> Path:
        path, size = self.kept / name, int(entry["bytes"])
        here = path.is_file() and path.stat().st_size == size
        if here and (name in self._checked or files.digest_of(path) == entry.get("xxh128")):
            self._checked.add(name)
            os.utime(path)  # used last now
            return path
        self._make_room(size)
        aside = path.with_name(f".{name}.{uuid4().hex[:8]}{files.UNFINISHED}")
        try:
            with self._plain_errors(name):
                self._with_patience(lambda fs, source: self._download(fs, source, aside, name, entry), name)
                aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        self._checked.add(name)
        return path

    def _download(self, fs: Any, source: str, aside: Path, name: str, entry: Entry) -> None:
        fs.get_file(source, str(aside))
        size, found = int(entry["bytes"]), aside.stat().st_size
        if found != size:
            raise _DamagedError(f"{self.where(name)} has {found:,} bytes instead of {size:,}; {self.repair}")
        if files.digest_of(aside) != entry.get("xxh128"):
            raise _DamagedError(f"{self.where(name)} is damaged (its digest is not the recorded one); {self.repair}")

    # --- a folder of bounded size -----------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        """Remove shards, of any store, the longest unused first, that nobody is about to open.

        What a process has open stays readable to it after that.
        """
        found = []
        for path in self.root.glob(f"*/*{KEPT}"):
            try:
                found.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:  # another process was faster
                continue
        total = sum(one[1] for one in found) + size
        for _, bytes_, path in sorted(found):
            if total <= self._most:
                return
            with self._lock(path.name, folder=path.parent, wait=False) as mine:
                if mine:
                    path.unlink(missing_ok=True)
                    self._checked.discard(path.name)
                    total -= bytes_

    @contextmanager
    def _lock(self, name: str, *, folder: Path | None = None, wait: bool = True) -> Iterator[bool]:
        """Hold a file's name against other processes and threads; without ``wait`` yields whether it could be had."""
        import fcntl

        folder = folder or self.kept
        with files.plain_errors(folder, "run the same command again"):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                mine = True
            except BlockingIOError:
                mine = False
            except OSError:  # a file system without locks
                mine = True
            yield mine
        finally:
            os.close(handle)

    # --- the other end ----------------------------------------------------------------------------

    def _connect(self) -> tuple[Any, str]:
        """File system and path of this process: connections do not survive a fork.

        Raises:
            ValueError: no such protocol, or its package is not installed.
        """
        import fsspec

        if self._connected is None or self._connected[0] != os.getpid():
            try:
                fs, path = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
            except ImportError as error:
                raise ValueError(f"features.path={self.url} needs another package: {error}") from None
            except ValueError as error:
                raise ValueError(
                    f"features.path={self.url}: {error}; give a folder, or a URL such as s3://bucket/store"
                ) from None
            self._connected = (os.getpid(), fs, path.rstrip("/"))
        return self._connected[1:]

    def _with_patience(self, ask: Callable[[Any, str], Any], name: str) -> Any:
        """``ask(fs, path)``, again after a pause where the answer did not come whole."""
        pauses = list(self.waits)
        while True:
            fs, path = self._connect()
            try:
                return ask(fs, f"{path}/{name}")
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # every protocol has errors of its own
                if not pauses or getattr(error, "errno", None) in files.FULL:
                    raise
                log.info("%s: %s; once more in %s s", self.where(name), error, pauses[0])
                time.sleep(pauses.pop(0))

    @contextmanager
    def _plain_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except _DamagedError as error:
            raise ValueError(str(error)) from None
        except FileNotFoundError:
            raise ValueError(f"{self.where(name)} is missing; {self.repair}") from None
        except PermissionError as error:
            raise ValueError(f"{self.where(name)} may not be read ({error}); check the credentials for it") from error
        except Exception as error:
            if getattr(error, "errno", None) in files.FULL:
                raise ValueError(
                    f"no space left for {self.kept}; free some, lower features.cache_gib, or choose another folder "
                    "with features.cache"
                ) from error
            told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ValueError(
                f"{self.where(name)} cannot be read ({told}); try again when {self.url} can be reached, or copy the "
                "store to this machine"
            ) from error


class _DamagedError(Exception):
    """An object that did not come as it was written."""
