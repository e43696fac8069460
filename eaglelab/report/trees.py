"""Draft trees of rounds as plain data for the viewer in the page (`templates/viewer.js`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from eaglelab.evaluation import read_records

MAX_ROUNDS = 3000  # of one page: about 3 MB of data
NAMES = ("rounds.parquet", "rounds.jsonl")


@dataclass
class Answers:
    """The answers whose rounds a page shows.

    title: where they come from.
    answers: one dict per answer, see `answer_of`.
    texts: what the tokens of all of them read as; answers hold places in this list.
    left_out: answers of the records that the page has no room for.
    """

    title: str
    answers: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "answers": self.answers, "texts": self.texts, "leftOut": self.left_out}


def load_answers(
    path: Path, *, title: str = "", ids: Sequence[str] | None = None, max_rounds: int = MAX_ROUNDS
) -> Answers:
    """The answers in a file of records that were written with `telemetry=FILE`.

    Args:
        ids: of the answers to take; None takes the first ones, whole, up to `max_rounds` rounds.

    Raises:
        ValueError: no such file, damaged records, records without trees, or an id that is not there.
    """
    return gather(read_records(path), title=title or str(path), ids=ids, max_rounds=max_rounds)


def gather(
    records: Iterable[Mapping[str, Any]],
    *,
    title: str,
    ids: Sequence[str] | None = None,
    max_rounds: int = MAX_ROUNDS,
) -> Answers:
    """`load_answers` for records at hand, which stand request by request."""
    found = Answers(title)
    places: dict[str, int] = {}
    seen: list[str] = []
    rounds = 0
    for _, group in groupby(records, key=lambda record: record.get("request")):
        lines = list(group)
        name = str(lines[0].get("id", lines[0].get("request")))
        seen.append(name)
        wanted = rounds == 0 or rounds + len(lines) <= max_rounds if ids is None else name in ids
        if wanted:
            found.answers.append(answer_of(lines, places))
            rounds += len(lines)
        else:
            found.left_out += 1
    if not found.answers or missing(ids, seen):
        shown = ", ".join(dict.fromkeys(seen[:12])) or "none"
        which = f"no answer {', '.join(missing(ids, seen))}" if seen else "no record"
        raise ValueError(f"{title}: {which}; its answers are {shown}{', ...' if len(seen) > 12 else ''}")
    found.texts = list(places)
    return found


def missing(wanted: Sequence[str] | None, seen: Sequence[str]) -> list[str]:
    return [name for name in wanted or () if name not in seen]


def answer_of(records: Sequence[Mapping[str, Any]], places: dict[str, int]) -> dict[str, Any]:
    """One answer: its rounds in order, token texts as places in `places` (which grows).

    Raises:
        ValueError: a record without a tree.
    """
    first = records[0]
    prompt = next((record["prompt"] for record in records if record.get("prompt")), None)
    return {
        "id": str(first.get("id", first.get("request"))),
        "turn": first.get("turn"),
        "prompt": prompt,
        "opening": _text(first, "root_text", "root_token"),
        "rounds": [_round(record, after, places) for record, after in pairwise([*records, None]) if record],
    }


def _round(record: Mapping[str, Any], after: Mapping[str, Any] | None, places: dict[str, int]) -> dict[str, Any]:
    if record.get("node_token") is None or record.get("published_tokens") is None:
        raise ValueError(
            f"the record of request {record.get('request')}, round {record.get('round')} has no tree: it was written "
            "by an older version; run `eaglelab evaluate ... telemetry=rounds.parquet` again"
        )

    def place(text: str) -> int:
        return places.setdefault(text, len(places))

    published = record.get("published_text") or [f"[{token}]" for token in record["published_tokens"]]
    accepted = int(record["accepted"])
    bonus = None
    if record["published"] > accepted:  # a round may end inside its accepted path
        bonus = place(_text(after, "root_text", "root_token") if after else published[-1] or _ending(record))
    return {
        "root": place(_text(record, "root_text", "root_token")),
        "tokens": [place(text) for text in [*_texts(record, "node"), *_texts(record, "dropped")]],
        "parents": [*record["node_parent"], *(record.get("dropped_parent") or ())],
        "confidence": [_rounded(p) for p in [*record["confidence"], *(record.get("dropped_confidence") or ())]],
        "kept": len(record["node_token"]),
        "accepted": [number for number, yes in enumerate(record["node_accepted"], start=1) if yes],
        "forwarded": [number for number, yes in enumerate(record["node_forwarded"], start=1) if yes],
        "bonus": bonus,
        "published": published,
        "count": accepted,  # of the published tokens, those that the drafter proposed
        "expanded": record.get("expanded"),
        "verified": record.get("verified"),
        "stop": record.get("stop_reason"),
        "ms": [_milliseconds(record.get(f"{phase}_s")) for phase in ("draft", "pack", "verify", "commit")],
    }


def _ending(record: Mapping[str, Any]) -> str:
    """The name of a last token that adds no text."""
    return "(end)" if record.get("stop_reason") == "eos" else f"[{record['published_tokens'][-1]}]"


def _text(record: Mapping[str, Any], text: str, token: str) -> str:
    return record[text] if record.get(text) is not None else f"[{record.get(token)}]"


def _texts(record: Mapping[str, Any], kind: str) -> list[str]:
    texts = record.get(f"{kind}_text")
    return texts if texts is not None else [f"[{token}]" for token in record.get(f"{kind}_token") or ()]


def _rounded(probability: float | None) -> float | None:
    if probability is None or not math.isfinite(probability):
        return None
    return float(f"{probability:.3g}")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)


def record_files(path: Path) -> Iterator[Path]:
    """The files of records at or below `path`, sorted.

    Raises:
        ValueError: there is none.
    """
    if path.is_file():
        yield path
        return
    found = sorted(file for name in NAMES for file in path.rglob(name)) if path.is_dir() else []
    if not found:
        raise ValueError(
            f"trees={path}: no {' or '.join(NAMES)} here; name a file that `eaglelab evaluate run=DIR "
            "telemetry=rounds.parquet` wrote, or a folder of `eaglelab compare`"
        )
    yield from found


def as_json(value: Any) -> str:
    """JSON for a <script> element: nothing in it can end the element or open a tag or a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
