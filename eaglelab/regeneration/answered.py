"""A conversation on its way to a row of training data, and where its answers come from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import eaglelab
from eaglelab.data.conversations import Conversation
from eaglelab.decoding import Sampling
from eaglelab.evaluation.chats import Chat

ENDED = "eos"  # the target ended the answer itself
FAILED = "failed"

# Recorded, not compared: the same target may lie elsewhere, and a scheduler gives a server another host every time.
_ADDRESSES = ("source", "server")


@dataclass(frozen=True)
class Answer:
    """One answer. ``tokens`` includes the end token, and is None where a server does not tell.

    stop_reason: "eos"; "length" (max_new_tokens) or "context" (the target's last position); or a server's own word.
    """

    text: str
    tokens: int | None
    stop_reason: str


@dataclass
class Answered:
    """A conversation and its answers so far.

    A cut answer is the last one: what follows a broken answer is no conversation to learn from.

    tokens: of all answers, None where unknown.
    stop_reason: of the last answer; "failed" where there is none to come.
    failure: why a question could not be answered.
    """

    chat: Chat
    tokens: int | None = 0
    stop_reason: str = ENDED
    failure: str | None = None

    @property
    def id(self) -> str:
        return self.chat.prompt.id

    @property
    def questions_left(self) -> int:
        """How many more turns will be asked."""
        return self.chat.questions - self.chat.turn if self.stop_reason == ENDED else 0

    def ask(self) -> bool:
        """Put the next question into the chat; False when there is none."""
        return self.questions_left > 0 and self.chat.ask("all")

    def take(self, answer: Answer) -> None:
        """Put the answer to the last question into the chat."""
        self.chat.answer(answer.text)
        self.tokens = None if self.tokens is None or answer.tokens is None else self.tokens + answer.tokens
        self.stop_reason = answer.stop_reason

    def fail(self, why: str) -> None:
        """The last question stays without an answer, for good."""
        turn = f"turn {self.chat.turn}: " if self.chat.questions > 1 else ""
        self.stop_reason, self.failure = FAILED, turn + why

    def to_row(self, origin: Origin) -> dict[str, Any]:
        """A line of conversations data (`messages`), which training reads, with its origin beside it."""
        reason = {} if self.failure is None else {"reason": self.failure}
        return {
            "id": self.id,
            "messages": self.chat.messages,
            "stop_reason": self.stop_reason,
            **reason,
            "tokens": self.tokens,
            **origin.record(self.chat.number),
        }


@dataclass(frozen=True)
class Origin:
    """How answers came about. Every row records it, and the rows of one file agree in it.

    sampling: settings; the prompt at place n of the data has the seed + n.
    max_new_tokens: limit of an answer.
    target: who answered.
    """

    sampling: Sampling
    max_new_tokens: int
    target: Mapping[str, Any]

    def record(self, number: int) -> dict[str, Any]:
        """The part of a row that says how the prompt at place ``number`` was answered; greedy answers have no seed."""
        sampling = self.sampling
        return {
            "sampling": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "seed": None if sampling.greedy else sampling.seed + number,
                "max_new_tokens": self.max_new_tokens,
            },
            "target": dict(self.target),
            "version": eaglelab.__version__,
        }

    def require_same(self, row: Mapping[str, Any], number: int | None, where: str) -> None:
        """Compare with what a row records; ``number`` is its prompt's place, None where it is not among the prompts.

        Raises:
            ValueError: names the first field that differs, and both values.
        """
        present = self.record(number or 0)
        for part in ("target", "sampling"):
            for name in {**row[part], **present[part]}:
                was, now = row[part].get(name), present[part].get(name)
                if was == now or name in _ADDRESSES or (name == "seed" and number is None):
                    continue
                place = " (a prompt's seed is seed= plus its place in the data)" if name == "seed" else ""
                raise ValueError(
                    f"{where}: field {part}.{name} was recorded as {was!r} but is {now!r} here{place}: use the "
                    "recorded value, or another out="
                )


class Watcher(Protocol):
    """Is told what happens, as it happens."""

    def answered(self, tokens: int | None, accepted: Sequence[int]) -> None:
        """A turn has its answer; ``accepted`` draft tokens in each of its draft rounds."""

    def ended(self, one: Answered) -> None:
        """No further turn of this conversation will be asked."""


class Source(Protocol):
    """Answers prompts."""

    @property
    def origin(self) -> Origin: ...

    def answer(self, prompts: Sequence[Conversation], done: Collection[str], watcher: Watcher) -> None:
        """Answer every prompt whose id is not in ``done``, in any order.

        Raises:
            ValueError: nothing more can be answered; what concerns one prompt goes to the watcher instead.
        """
