"""Prompts of one or more turns, answered turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eaglelab.data.chat import encode_prompt
from eaglelab.data.conversations import Conversation, Message

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

    @property
    def questions(self) -> int:
        """User turns of the prompt, asked or not."""
        return sum(message["role"] == "user" for message in self.prompt.messages)

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
