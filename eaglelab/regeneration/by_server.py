"""Answers by a server with OpenAI's interface: vLLM, SGLang and others."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from eaglelab.data.conversations import Conversation
from eaglelab.decoding import Sampling
from eaglelab.evaluation.chats import Chat
from eaglelab.regeneration.answered import Answered, Origin, Watcher
from eaglelab.regeneration.client import Client, ClientSettings, PromptFailed


class ServerSource:
    """Keeps a bounded number of conversations on their way to a server.

    Every setting of the sampling is sent, neutral ones too: what a request leaves out, a server fills in from the
    model's generation_config.json, and the rows would record settings that were not used.

    Args:
        url: of the interface, such as ``http://localhost:8000/v1``.
        model: one of the server's names; None: its only one.
        key: sent as a bearer token.

    Raises:
        ValueError: the server cannot be used, does not have the model, or a setting cannot be sent.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        settings: ClientSettings | None = None,
        key: str | None = None,
    ) -> None:
        self._settings = settings or ClientSettings()
        self._url, self._key = url, key
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: ask for at least one token")
        neutral = (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (None, 0, 1)
        if not self._settings.extensions and not neutral:
            raise ValueError("client.extensions=false sends no top_k, min_p or repetition_penalty: leave them out")
        model = choose_model(asyncio.run(self._models()), model, url)
        body = {"body": dict(self._settings.body)} if self._settings.body else {}
        self.origin = Origin(sampling, max_new_tokens, {"server": url, "model": model, **body})

    async def _models(self) -> list[str]:
        async with Client(self._url, self._settings, self._key) as client:
            return await client.models()

    def answer(self, prompts: Sequence[Conversation], done: Collection[str], watcher: Watcher) -> None:
        """See `Source.answer`."""
        asyncio.run(self._answer(prompts, done, watcher))

    async def _answer(self, prompts: Sequence[Conversation], done: Collection[str], watcher: Watcher) -> None:
        waiting = (Answered(Chat(prompt, n)) for n, prompt in enumerate(prompts) if prompt.id not in done)
        limit = _FailureLimit(watcher, self._settings.max_failures)
        try:
            async with Client(self._url, self._settings, self._key) as client, asyncio.TaskGroup() as workers:
                for _ in range(self._settings.concurrency):
                    workers.create_task(self._work(client, waiting, limit))
        except ExceptionGroup as errors:  # of one cause, met by several workers
            raise errors.exceptions[0] from None

    async def _work(self, client: Client, waiting: Iterable[Answered], watcher: Watcher) -> None:
        for one in waiting:  # all workers take from one iterator
            try:
                while one.ask():
                    answer = await client.answer(self.request(one))
                    one.take(answer)
                    watcher.answered(answer.tokens, ())
            except PromptFailed as error:
                one.fail(str(error))
            watcher.ended(one)

    def request(self, one: Answered) -> dict[str, Any]:
        """The body that asks for the answer to the conversation's last question."""
        record = self.origin.record(one.chat.number)["sampling"]
        body = {
            "model": self.origin.target["model"],
            "messages": one.chat.messages,
            "max_tokens": self.origin.max_new_tokens,
            "temperature": record["temperature"],
            "top_p": record["top_p"],
        }
        if record["seed"] is not None:
            body["seed"] = record["seed"]
        if self._settings.extensions:
            top_k = -1 if record["top_k"] is None else record["top_k"]  # -1: all
            body |= {"top_k": top_k, "min_p": record["min_p"], "repetition_penalty": record["repetition_penalty"]}
        return body | dict(self._settings.body)


def choose_model(served: Sequence[str], model: str | None, url: str) -> str:
    """``model``, or the only one that is served.

    Raises:
        ValueError: it is not served, or there is a choice to make; lists the server's models.
    """
    if model in served and model is not None:
        return model
    if model is None and len(served) == 1:
        return served[0]
    wanted = "choose one with model=" if model is None else f"model={model} is not among them"
    raise ValueError(f"server {url} has {', '.join(served) or 'no model'}: {wanted}")


class _FailureLimit:
    """Ends the job when prompts fail one after the other: then it is not about them."""

    def __init__(self, watcher: Watcher, limit: int) -> None:
        self._watcher, self._limit = watcher, limit
        self._in_a_row = 0

    def answered(self, tokens: int | None, accepted: Sequence[int]) -> None:
        self._in_a_row = 0
        self._watcher.answered(tokens, accepted)

    def ended(self, one: Answered) -> None:
        self._watcher.ended(one)
        self._in_a_row += one.failure is not None
        if self._in_a_row >= self._limit:
            raise ValueError(
                f"{self._in_a_row} prompts in a row failed, the last one ({one.id}) with: {one.failure}. "
                "client.max_failures= sets how many may"
            )
