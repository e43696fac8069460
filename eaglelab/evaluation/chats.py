"""Prompts of one or more turns, answered turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eaglelab.data.chat import encode_prompt
from eaglelab.data.conversations import Conversation, Message
from eaglelab.decoding import Engine, GenerationResult, Sampling

if TYPE_CHECKING:
    from eaglelab.target.frozen import FrozenTarget

Encode = Callable[[list[Message]], Sequence[int]]  # messages -> prompt ids
Decode = Callable[[Sequence[int]], str]  # answer ids -> text, for the next turn


@dataclass
class Chat:
    """A prompt on its way: what has been said, and where in the prompt that was."""

    prompt: Conversation
    number: int
    messages: list[Message] = field(default_factory=list)
    turn: int = 0

    def ask(self, turns: str) -> bool:
        """Take in everything up to the next question; False when no question is left."""
        if turns == "first" and self.turn == 1:
            return False
        users = [place for place, message in enumerate(self.prompt.messages) if message["role"] == "user"]
        if self.turn == len(users):
            return False
        begin = users[self.turn - 1] + 1 if self.turn else 0
        self.messages += self.prompt.messages[begin : users[self.turn] + 1]
        self.turn += 1
        return True

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})


@dataclass
class Answered:
    """A conversation with its answers, and what decoding them took.

    results: one per turn.
    """

    chat: Chat
    results: list[GenerationResult] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """A line of conversations data (`messages`), which training reads, with figures beside it."""
        accepted = [count for result in self.results for count in result.accepted]
        return {
            "id": self.chat.prompt.id,
            "messages": self.chat.messages,
            "tokens": sum(len(result.tokens) for result in self.results),
            "stop_reason": self.results[-1].stop_reason,
            "tau": 1 + sum(accepted) / len(accepted) if accepted else None,
        }


def answer_all(
    engine: Engine,
    prompts: Sequence[Conversation],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    batch: int,
    on_answer: Callable[[GenerationResult], None] | None = None,
) -> Iterator[Answered]:
    """Answer every turn of every prompt, `batch` prompts at a time; yields conversations in their order.

    Prompt i has the seed `sampling.seed` + i. `on_answer` is called after every answer, whatever its order.

    Raises:
        ValueError: the target has no tokenizer, or a prompt leaves no room for an answer.
    """
    encode, decode = chat_encoder(engine.target), chat_decoder(engine.target)
    for first in range(
        0, len(prompts), 4 * batch
    ):  # few enough that answers come out soon, enough to keep batches full
        group = [Answered(Chat(prompt, first + n)) for n, prompt in enumerate(prompts[first : first + 4 * batch])]
        active = group
        while active := [one for one in active if one.chat.ask("all")]:
            results = engine.generate(
                [list(encode(one.chat.messages)) for one in active],
                max_new_tokens=max_new_tokens,
                sampling=[sampling.with_seed(sampling.seed + one.chat.number) for one in active],
                batch=batch,
                on_finish=None if on_answer is None else lambda number, result: on_answer(result),
            )
            for one, result in zip(active, results, strict=True):
                one.results.append(result)
                one.chat.answer(decode(result.tokens))
        yield from group


def chat_encoder(target: FrozenTarget) -> Encode:
    """Messages -> prompt ids, by the target's chat template.

    Raises:
        ValueError: the target has no tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer: load it with one, or pass encode=")
    return lambda messages: encode_prompt(target.tokenizer, messages)


def chat_decoder(target: FrozenTarget) -> Decode:
    """Answer ids -> text."""
    return lambda ids: target.tokenizer.decode(ids, skip_special_tokens=True)
