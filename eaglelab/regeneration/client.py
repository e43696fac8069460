"""Requests to an OpenAI-compatible server that outlast its bad moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Self, TypeVar

import httpx2

from eaglelab.regeneration.answered import ENDED, Answer

_BUSY = frozenset({408, 409, 425, 429})  # and every 5xx: ask again
_THIS_REQUEST = frozenset({400, 413, 422})  # no use in asking again, but another prompt may be fine
_LONGEST_WAIT_S = 60.0
_CONNECT_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True)
class ClientSettings:
    """How to deal with a server.

    concurrency: requests on their way at a time.
    timeout: seconds without a byte before a request is given up.
    retries: further attempts after the first.
    wait: seconds before the second attempt; doubled before each further one, up to a minute, shortened by chance so
        that requests that failed together do not come back together. A Retry-After header is obeyed instead, by all
        requests.
    max_failures: failed prompts in a row that end the job.
    extensions: also send top_k, min_p and repetition_penalty, which are not in OpenAI's own interface.
    body: further fields of every request.

    Raises:
        ValueError: a setting out of range, or a field in ``body`` that has a setting of its own.
    """

    concurrency: int = 32
    timeout: float = 600.0
    retries: int = 6
    wait: float = 1.0
    max_failures: int = 20
    extensions: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("retries", 0), ("wait", 0), ("max_failures", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"client.{name}={getattr(self, name)}: at least {least} is needed")
        if self.timeout <= 0:
            raise ValueError(f"client.timeout={self.timeout}: give the seconds that an answer may take")
        own = {
            "model",
            "messages",
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "seed",
        }
        if taken := sorted(own & set(self.body)):
            raise ValueError(f"client.body has {taken[0]}, which is a setting of its own: pass {taken[0]}=")
        if fixed := sorted({"n", "stream"} & set(self.body)):
            raise ValueError(f"client.body has {fixed[0]}: one whole answer per request is expected")


class PromptFailed(Exception):  # noqa: N818
    """This request has no answer; others may."""


class Malformed(Exception):  # noqa: N818
    """A reply that is no answer, as a broken proxy or a dying server sends it."""


class Client:
    """Reads models and answers from one server.

    Args:
        url: ends where ``/models`` and ``/chat/completions`` begin, usually with ``/v1``.
        key: sent as a bearer token.
        sleep: waits so many seconds.

    Raises:
        ValueError: no HTTP address.
    """

    def __init__(
        self,
        url: str,
        settings: ClientSettings,
        key: str | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"server={url} is no address: it looks like http://localhost:8000/v1")
        self._settings = settings
        self._sleep = sleep
        self._quiet_until = 0.0
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(settings.timeout, connect=_CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of the models that the server has.

        Raises:
            ValueError: the server is not there, wants a key, or has no such interface.
        """
        try:
            return await self._send("GET", "models", None, read_models)
        except PromptFailed as error:
            raise ValueError(f"server {self.url} cannot be used: {error}") from error

    async def answer(self, body: Mapping[str, Any]) -> Answer:
        """The answer to one chat.

        Raises:
            PromptFailed: none, after all attempts, or for good.
            ValueError: the server refuses every such request: key, address or model are wrong.
        """
        return await self._send("POST", "chat/completions", body, read_answer)

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, read: Callable[[httpx2.Response], T]
    ) -> T:
        attempts = self._settings.retries + 1
        for attempt in range(attempts):
            if (pause := self._quiet_until - asyncio.get_running_loop().time()) > 0:
                await self._sleep(pause * random.uniform(1, 1.1))
            after = None
            try:
                response = await self._http.request(method, path, json=body)
                if response.is_success:
                    return read(response)
                problem = f"HTTP {response.status_code}{said(response)}"
                if response.status_code not in _BUSY and response.status_code < 500:
                    await self._refuse(response, problem, body)
                after = retry_after(response)
            except httpx2.RequestError as error:
                problem = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
                if body is None and isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                    raise ValueError(
                        f"server {self.url} is not reachable ({error}): is it running, and is the address right?"
                    ) from error
            except Malformed as error:
                problem = str(error)
            if attempt < attempts - 1:
                await self._back_off(attempt, after)
        raise PromptFailed(f"{problem} (attempt {attempts} of {attempts})")

    async def _back_off(self, attempt: int, after: float | None) -> None:
        if after is None:
            longest = min(self._settings.wait * 2 ** min(attempt, 30), _LONGEST_WAIT_S)
            await self._sleep(longest * random.uniform(0.5, 1))
        else:
            self._quiet_until = max(self._quiet_until, asyncio.get_running_loop().time() + after)

    async def _refuse(self, response: httpx2.Response, problem: str, body: Mapping[str, Any] | None) -> None:
        status = response.status_code
        if status in _THIS_REQUEST:
            raise PromptFailed(problem)
        if status in (401, 403):
            raise ValueError(
                f"server {self.url} refuses the key: {problem}. Put the key into the environment variable that "
                "client.key_variable names (OPENAI_API_KEY)"
            )
        if status == 404 and body is not None:
            raise ValueError(
                f"server {self.url} does not answer for model={body['model']}: {problem}; it has "
                f"{', '.join(await self.models())}"
            )
        if status == 404:
            raise ValueError(
                f"server {self.url} has no /models ({problem}): the address of an OpenAI-compatible interface usually "
                "ends in /v1, such as http://localhost:8000/v1"
            )
        raise ValueError(f"server {self.url} cannot be used: {problem}")


def read_answer(response: httpx2.Response) -> Answer:
    """The first choice of a chat completion.

    Raises:
        Malformed: the reply is none.
        PromptFailed: it holds no text.
    """
    try:
        reply = response.json()
        choice = reply["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
        tokens = (reply.get("usage") or {}).get("completion_tokens")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Malformed(f"a reply that is no chat completion: {response.text[:80]!r}") from error
    if not isinstance(text, str):
        raise PromptFailed(f"an answer without text (finish_reason {reason})")
    return Answer(text, tokens, ENDED if reason == "stop" else str(reason))


def read_models(response: httpx2.Response) -> list[str]:
    """The names in a list of models.

    Raises:
        Malformed: the reply is none.
    """
    try:
        return [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, LookupError, TypeError) as error:
        raise Malformed(f"a reply that is no list of models: {response.text[:80]!r}") from error


def said(response: httpx2.Response) -> str:
    """What a server says about an error, in any of the forms that servers use; empty where it says nothing."""
    try:
        reply = response.json()
    except ValueError:
        return f" {text[:200]!r}" if (text := response.text.strip()) else ""
    if isinstance(reply, dict):
        error = reply.get("error")
        reply = (
            (error.get("message") if isinstance(error, dict) else error) or reply.get("message") or reply.get("detail")
        )
    return f" {str(reply)[:500]!r}" if reply else ""


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds that the server asks to wait, from either form of the header; None where it does not."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        then = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max((then.replace(tzinfo=then.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
