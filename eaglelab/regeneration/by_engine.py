"""Answers by the engine, with or without a drafter."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from eaglelab.data.conversations import Conversation
from eaglelab.decoding import Engine, GenerationResult, Sampling
from eaglelab.evaluation.chats import Chat, chat_decoder, chat_encoder
from eaglelab.regeneration.answered import Answer, Answered, Origin, Watcher

GROUP = 8  # batches


class EngineSource:
    """Answers groups of prompts of fixed membership.

    Which sequences share a batch may change a logit in its last bit. A resumed job therefore decodes the interrupted
    group again as a whole, and gives what an uninterrupted one gives even in half precision. A group is eight batches:
    few enough that little is decoded twice, enough that batches are mostly full.

    Args:
        engine: its drafter changes the time, not the answers.
        batch: prompts that are decoded together.

    Raises:
        ValueError: the target cannot chat (no tokenizer, no chat template).
    """

    def __init__(self, engine: Engine, *, max_new_tokens: int, sampling: Sampling, batch: int) -> None:
        if batch < 1:
            raise ValueError(f"batch={batch}: decode at least one prompt at a time")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: ask for at least one token")
        self._engine, self._batch = engine, batch
        self._encode, self._decode = chat_encoder(engine.target), chat_decoder(engine.target)
        self._encode([{"role": "user", "content": "?"}])
        fingerprint = engine.target.fingerprint
        dtype = str(engine.target.dtype).removeprefix("torch.")
        target = {"source": fingerprint.source, "fingerprint": fingerprint.short, "dtype": dtype}
        self.origin = Origin(sampling, max_new_tokens, target)

    def answer(self, prompts: Sequence[Conversation], done: Collection[str], watcher: Watcher) -> None:
        """See `Source.answer`."""
        size = GROUP * self._batch
        for first in range(0, len(prompts), size):
            group = [Answered(Chat(prompt, first + n)) for n, prompt in enumerate(prompts[first : first + size])]
            if any(one.id not in done for one in group):
                self._answer_group(group, {one.id for one in group if one.id in done}, watcher)

    def _answer_group(self, group: Sequence[Answered], done: Collection[str], watcher: Watcher) -> None:
        """Turn by turn: the next turns of all, then those after them."""

        def finish(number: int, result: GenerationResult) -> None:
            one = asking[number]
            one.take(Answer(self._decode(result.tokens), len(result.tokens), result.stop_reason))
            if one.id not in done:
                watcher.answered(len(result.tokens), result.accepted if self._engine.drafter is not None else ())
                if not one.questions_left:
                    watcher.ended(one)

        while asked := [one for one in group if one.ask()]:
            prompt_ids = [self._prompt_ids(one) for one in asked]
            asking = [one for one in asked if one.failure is None]
            for one in asked:
                if one.failure is not None and one.id not in done:
                    watcher.ended(one)
            if not asking:
                return
            base = self.origin.sampling
            self._engine.generate(
                [ids for ids in prompt_ids if ids is not None],
                max_new_tokens=self.origin.max_new_tokens,
                sampling=[base.with_seed(base.seed + one.chat.number) for one in asking],
                batch=self._batch,
                on_finish=finish,
            )

    def _prompt_ids(self, one: Answered) -> list[int] | None:
        try:
            ids = list(self._encode(one.chat.messages))
        except ValueError as error:  # the chat template rejects this conversation
            one.fail(str(error))
            return None
        positions = self._engine.target.max_positions
        if not 0 < len(ids) < positions:
            one.fail(f"the prompt has {len(ids)} tokens and the target {positions} positions")
            return None
        return ids
