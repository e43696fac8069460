"""Conversations from files: strict readers that name the file and the line of whatever is wrong.

Four row shapes are understood; other keys of a row are ignored.

=================  ==============================================================================
``messages``       ``[{"role": "system" | "user" | "assistant", "content": str}, ...]``
``conversations``  ShareGPT, ``[{"from": ..., "value": str}, ...]`` from system, human, user, gpt or assistant
``question``       with ``answer``: one user turn and its answer
``turns``          user turns without answers (evaluation), optional ``reference``
=================  ==============================================================================
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

Message = dict[str, str]
Paths = str | Path | Sequence[str | Path]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES = _ROLES | {"human": "user", "gpt": "assistant"}
_SHAPES = "`messages`, `conversations` (ShareGPT), `question` with `answer`, or `turns`"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:\w+)?")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One chat.

    Attributes:
        id: the row's ``id`` or ``question_id``, else ``file:line``, the file without its folder.
        messages: ``{"role", "content"}`` records in order.
        reference: reference answers of an evaluation row, may be empty.
        category: the row's ``category``, may be empty.
    """

    id: str
    messages: tuple[Message, ...]
    reference: tuple[str, ...] = ()
    category: str = ""

    @property
    def answered(self) -> bool:
        """Has an assistant message."""
        return any(message["role"] == "assistant" for message in self.messages)


def load_conversations(paths: Paths, limit: int | None = None) -> list[Conversation]:
    """Read conversations to train on: every one has at least one assistant message.

    Args:
        paths: file(s) ending in .jsonl, .jsonl.gz, .json or .parquet, folders of such files, or data sets of
            the Hugging Face hub as ``owner/name`` or ``owner/name:split``.
        limit: keep the first ``limit`` conversations.

    Raises:
        ValueError: a missing or empty file, a line that is not JSON, a row of unknown shape, an unknown role,
            content that is not text, or a row without an answer; names file and line.
    """
    loaded: list[Conversation] = []
    for where, row in _rows(paths, limit):
        conversation = parse_conversation(row, where)
        if not conversation.answered:
            _fail(
                where,
                "has user turns but no assistant answer, so there is nothing to learn from",
                "let the target answer the prompts first and train on the answered file, or use the file for "
                "evaluation",
            )
        loaded.append(conversation)
    return loaded


def load_prompts(paths: Paths, limit: int | None = None) -> list[Conversation]:
    """Read conversations to be answered: system and user turns only.

    Answers in the file are kept as ``reference``. Arguments and errors as in :func:`load_conversations`.
    """
    prompts: list[Conversation] = []
    for where, row in _rows(paths, limit):
        chat = parse_conversation(row, where)
        asked = tuple(m for m in chat.messages if m["role"] != "assistant")
        if not any(m["role"] == "user" for m in asked):
            _fail(where, "has no user turn", "every prompt needs a question to answer")
        answers = tuple(m["content"] for m in chat.messages if m["role"] == "assistant")
        prompts.append(dataclasses.replace(chat, messages=asked, reference=chat.reference or answers))
    return prompts


def parse_conversation(row: Any, where: str) -> Conversation:
    """Turn one decoded row into a :class:`Conversation`; ``where`` ("file:line") opens every error."""
    if not isinstance(row, dict):
        _fail(where, f"is a {type(row).__name__}, not an object", f"one row is an object with {_SHAPES}")
    if row.get("messages") is not None:
        messages = _chat(row["messages"], where, "messages", "role", "content", _ROLES)
    elif row.get("conversations") is not None:
        messages = _chat(row["conversations"], where, "conversations", "from", "value", _SHAREGPT_ROLES)
    elif row.get("question") is not None:
        question = _text(row["question"], where, "question")
        messages = ({"role": "user", "content": question},)
        if row.get("answer") is not None:
            answer = _text(row["answer"], where, "answer")
            messages += ({"role": "assistant", "content": answer},)
    elif row.get("turns") is not None:
        turns = _sequence(row["turns"], where, "turns")
        messages = tuple({"role": "user", "content": _text(turn, where, f"turns[{i}]")} for i, turn in enumerate(turns))
    else:
        keys = ", ".join(f"`{key}`" for key in list(row)[:8]) or "nothing"
        _fail(where, f"has {keys}", f"one row needs {_SHAPES}")
    place = where.rpartition("/")[2]  # the same from every working directory
    name = next((row[key] for key in ("id", "question_id") if row.get(key) is not None), place)
    return Conversation(str(name), messages, _reference(row, where), str(row.get("category") or ""))


def _chat(
    value: Any, where: str, field: str, role_key: str, text_key: str, roles: dict[str, str]
) -> tuple[Message, ...]:
    messages = []
    for i, message in enumerate(_sequence(value, where, field)):
        at = f"{field}[{i}]"
        if not isinstance(message, dict) or role_key not in message or text_key not in message:
            _fail(
                where,
                f"`{at}` lacks `{role_key}` or `{text_key}`",
                f"each needs `{role_key}` and `{text_key}`",
            )
        role = message[role_key]
        if not isinstance(role, str) or role not in roles:
            _fail(where, f"`{at}` has unknown {role_key} {role!r}", f"use one of {', '.join(roles)}")
        messages.append({"role": roles[role], "content": _text(message[text_key], where, f"{at}.{text_key}")})
    return tuple(messages)


def _sequence(value: Any, where: str, field: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        _fail(where, f"`{field}` is {_shown(value)}", "it must be a list with at least one entry")
    return value


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        _fail(
            where,
            f"`{field}` is {_shown(value)}",
            "it must be text (images, tools and parts are not supported)",
        )
    return value


def _reference(row: dict[str, Any], where: str) -> tuple[str, ...]:
    value = row.get("reference")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        _fail(where, f"`reference` is {_shown(value)}", "it must be text, or a list of texts")
    nested = (entry if isinstance(entry, list) else [entry] for entry in value)  # Spec-Bench: lists of lists
    return tuple(_text(entry, where, "reference") for entries in nested for entry in entries)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _fail(where: str, what: str, way_out: str) -> NoReturn:
    raise ValueError(f"{where}: {what}; {way_out}")


def _rows(paths: Paths, limit: int | None) -> Iterator[tuple[str, Any]]:
    """(where, decoded row) of every row of every source, at most ``limit`` in all."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} keeps no conversation; use a positive number, or null for all")
    sources = [paths] if isinstance(paths, str | Path) else list(paths)
    if not sources:
        raise ValueError("no data file was given; name at least one")
    count = 0
    for source in sources:
        for file_or_name in _expand(source):
            empty = True
            for item in _read(file_or_name):
                empty = False
                yield item
                count += 1
                if count == limit:
                    return
            if empty:
                _fail(str(file_or_name), "holds no conversation", "check the path, or remove it from the list")


def _expand(source: str | Path) -> list[Path] | list[str]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
        return files or _fail(str(path), "is a folder without data files", f"it needs {', '.join(SUFFIXES)} files")
    if path.is_file():
        if path.name.endswith(SUFFIXES):
            return [path]
        _fail(str(path), "has an unknown file type", f"rename or convert it to one of {', '.join(SUFFIXES)}")
    if _HUB_NAME.fullmatch(str(source)) and not str(source).endswith(SUFFIXES):
        return [str(source)]
    _fail(str(source), "no such file", "check the path (a relative one starts at the working directory)")


def _read(source: Path | str) -> Iterator[tuple[str, Any]]:
    if isinstance(source, str):
        return _read_hub(source)
    if source.name.endswith(".parquet"):
        return _read_parquet(source)
    if source.name.endswith(".json"):
        return _read_json(source)
    return _read_jsonl(source)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as lines:
        number = 0
        while True:
            number += 1
            where = f"{path}:{number}"
            try:
                line = lines.readline()
            except (OSError, EOFError) as error:
                _fail(where, f"cannot be read ({error})", "is the file complete?")
            if not line:
                return
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip().decode("utf-8"))
            except UnicodeDecodeError as error:
                _fail(
                    where,
                    f"is not UTF-8 ({error.reason} at byte {error.start + 1})",
                    "save the file as UTF-8",
                )
            except json.JSONDecodeError as error:
                _fail(
                    where,
                    f"is not a JSON object ({error.msg} at column {error.colno})",
                    "write one complete object per line, or remove the line",
                )
            yield where, row


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        _fail(str(path), f"is not UTF-8 ({error.reason} at byte {error.start + 1})", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        way_out = "a .json file holds one list of rows; name it .jsonl if it has one object per line"
        _fail(f"{path}:{error.lineno}", f"is not JSON ({error.msg} at column {error.colno})", way_out)
    if not isinstance(content, list):
        _fail(str(path), f"holds a {type(content).__name__}", "a .json file holds one list of rows")
    for i, row in enumerate(content, start=1):
        yield f"{path}: row {i}", row


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        table = datasets.Dataset.from_parquet(str(path), keep_in_memory=True)
    except Exception as error:  # datasets wraps whatever the reader raises
        cause = error.__cause__ or error
        _fail(str(path), f"cannot be read as Parquet ({cause})", "is the file complete?")
    for i, row in enumerate(table, start=1):
        yield f"{path}: row {i}", row


def _read_hub(name: str) -> Iterator[tuple[str, Any]]:
    import datasets

    repository, _, split = name.partition(":")
    try:
        table = datasets.load_dataset(repository, split=split or "train")
    except Exception as error:  # offline, unknown name, unknown split, gated: all end the same way for the user
        way_out = "is the path right, the network reachable, and the split (owner/name:split) correct?"
        _fail(name, f"is neither a file here nor a data set the hub gave ({error})", way_out)
    for i, row in enumerate(table, start=1):
        yield f"{name}: row {i}", row
