"""The file that answers go to: appended while the job runs, continued by the next one, in order when it is done.

Two files, both of one row per prompt: OUT holds the rows to train on, OUT.left_out those that are not, with what is
known about them. A row goes to its file as soon as it is there. At the end both are rewritten in the order of the
prompts, so that they do not tell in which order the answers came or how often the job was interrupted. A prompt that
failed is asked again by the next job.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

from filelock import FileLock, Timeout

from eaglelab.data.conversations import Conversation
from eaglelab.regeneration.answered import ENDED, FAILED, Answered, Origin

Keep = Literal["ended", "all"]

_BEGIN = b'{"id": '
_NEEDED = {"id": str, "messages": list, "stop_reason": str, "sampling": dict, "target": dict}


class _Place(NamedTuple):
    """A row in one of the two files: bytes [begin, begin + size)."""

    kept: bool
    begin: int
    size: int
    stop_reason: str


class AnswerFile:
    """A context manager: locked and read on entry, closed on exit.

    Args:
        path: OUT, a .jsonl file; need not exist.
        prompts: with distinct ids.
        origin: what the rows record; those that are there must agree.
        keep: "ended" leaves out answers that were cut; "all" trains on them too. Another choice than that of an earlier
            job moves its rows.

    Attributes:
        left_out: the path of the other file.

    Raises:
        ValueError: duplicate ids; on entry: another job writes here, or the file holds something else, an answer to
            another text, or one of another origin.
    """

    def __init__(self, path: str | Path, prompts: Sequence[Conversation], origin: Origin, keep: Keep = "ended") -> None:
        self.path = Path(path)
        self.left_out = Path(f"{path}.left_out")
        if self.path.suffix != ".jsonl":
            raise ValueError(f"out={path}: name it .jsonl, which training reads")
        if keep not in get_args(Keep):
            raise ValueError(f"keep={keep!r} is unknown; choose one of: {', '.join(get_args(Keep))}")
        self._prompts = {prompt.id: (number, prompt) for number, prompt in enumerate(prompts)}
        if len(self._prompts) < len(prompts):
            again = next(name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1)
            raise ValueError(
                f"more than one prompt has the id {again!r}: answers are told apart by it, so make it unique"
            )
        self._origin, self._keep = origin, keep
        self._places: dict[str, _Place] = {}
        self._files: dict[bool, FileIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        try:
            self._stack.enter_context(lock.acquire(timeout=0))
        except Timeout:
            raise ValueError(f"another job writes to out={self.path}: wait for it, or choose another name") from None
        try:
            for kept in (True, False):
                self._read(kept)
                self._files[kept] = self._stack.enter_context(open(self._path(kept), "ab", buffering=0))
            self._move()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        if self.left_out.is_file() and not self.left_out.stat().st_size:
            self.left_out.unlink()

    @property
    def done(self) -> Collection[str]:
        """Ids of the prompts that need no further answer."""
        return {name for name, place in self._places.items() if place.stop_reason != FAILED}

    @property
    def stop_reasons(self) -> dict[bool, Counter[str]]:
        """How many rows ended for which reason: True those to train on, False those left out."""
        counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        for place in self._places.values():
            counts[place.kept][place.stop_reason] += 1
        return counts

    def append(self, one: Answered) -> None:
        """Write the conversation's row and hand it to the operating system.

        Raises:
            OSError: the disk is full, or the like; the rows before it are safe.
        """
        line = json.dumps(one.to_row(self._origin), ensure_ascii=False).encode() + b"\n"
        self._append(one.id, line, one.stop_reason)

    def finish(self) -> None:
        """Put both files into the order of the prompts; rows of other prompts stay, at the end."""
        for kept in (True, False):
            places = sorted(
                (self._prompts[name][0] if name in self._prompts else len(self._prompts), place.begin, place.size)
                for name, place in self._places.items()
                if place.kept == kept
            )
            self._rewrite(self._path(kept), [(begin, size) for _, begin, size in places])

    # ---- rows ---------------------------------------------------------------------------------------------------

    def _path(self, kept: bool) -> Path:
        return self.path if kept else self.left_out

    def _is_kept(self, stop_reason: str) -> bool:
        return stop_reason == ENDED or (self._keep == "all" and stop_reason != FAILED)

    def _append(self, name: str, line: bytes, stop_reason: str) -> None:
        kept = self._is_kept(stop_reason)
        file = self._files[kept]
        begin = file.seek(0, os.SEEK_END)
        if file.write(line) < len(line):  # the next job drops what was written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path(kept)))
        self._places[name] = _Place(kept, begin, len(line), stop_reason)

    def _move(self) -> None:
        """Copy the rows that are in the wrong file for this `keep`; `finish` drops them where they were."""
        for name, place in list(self._places.items()):
            if self._is_kept(place.stop_reason) != place.kept:
                with open(self._path(place.kept), "rb") as file:
                    file.seek(place.begin)
                    self._append(name, file.read(place.size), place.stop_reason)

    def _rewrite(self, path: Path, places: Sequence[tuple[int, int]]) -> None:
        aside = Path(f"{path}.tmp")
        try:
            with open(path, "rb") as old, open(aside, "wb") as new:
                for begin, size in places:
                    old.seek(begin)
                    new.write(old.read(size))
                new.flush()
                os.fsync(new.fileno())
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    # ---- what an earlier job left ---------------------------------------------------------------------------------

    def _read(self, kept: bool) -> None:
        path = self._path(kept)
        if not path.exists():
            return
        whole = 0
        for where, begin, line in _lines(path):
            if line.endswith(b"\n"):
                whole = begin + len(line)
                self._take(kept, begin, line, where)
            elif not line.startswith(_BEGIN[: len(line)]):
                raise _not_ours(where)
        os.truncate(path, whole)  # a row that was being written when its job was killed

    def _take(self, kept: bool, begin: int, line: bytes, where: str) -> None:
        row = _row(line, where)
        number, prompt = self._prompts.get(row["id"], (None, None))
        self._origin.require_same(row, number, where)
        if prompt is not None:
            asked = [message for message in row["messages"] if message["role"] != "assistant"]
            if asked != list(prompt.messages[: len(asked)]):
                raise ValueError(
                    f"{where}: the prompt {row['id']!r} was another text when it was answered: choose another out=, or "
                    "give the prompts ids of their own"
                )
        known = self._places.get(row["id"])
        if known is None or known.stop_reason == FAILED:  # moving a row, or asking again, was cut short
            self._places[row["id"]] = _Place(kept, begin, len(line), row["stop_reason"])


def _lines(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """(where, first byte, line) of a file."""
    begin = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield f"{path}:{number}", begin, line
            begin += len(line)


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        if not line.startswith(_BEGIN):
            raise _not_ours(where) from error
        raise ValueError(f"{where} is damaged ({error}): remove the line, and its prompt is answered again") from error
    if not isinstance(row, dict) or any(not isinstance(row.get(name), kind) for name, kind in _NEEDED.items()):
        raise _not_ours(where)
    return row


def _not_ours(where: str) -> ValueError:
    return ValueError(f"{where} is no row that `eaglelab generate` wrote: choose another out=")
