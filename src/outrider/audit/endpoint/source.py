"""The completers of prompts: the server under audit, another one, or a model on this machine."""

import asyncio
import math
import time
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ...base.outside.stamped import Client, StampedAnswer
from ...errors import EndpointError, RequestError, shown
from .answers import EndpointCompletion, Token, completions, law_of, message, parsed

T = TypeVar("T")
REQUESTS_AT_ONCE = 8
ANSWER_SECONDS = 120.0  # the longest wait for an answer
REFUSAL_CODES = (400, 404, 405, 413, 415, 422, 501)
BUSY_CODES = (429, 503)
RETRIES = 6
PAUSE_SECONDS = 0.25  # seconds before a busy server is asked again; they double each time
Given = str | tuple[int, ...]  # a prompt: a text, or token ids
PLAIN_FIELDS = {"temperature": 1.0, "top_p": 1.0}
NEUTRAL_FIELDS = {
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "return_token_ids": True,
}  # fmt: skip
"""Fields that override a server's own defaults, if it knows the fields."""


class RefusedRequest(EndpointError):
    """The server refuses a request."""


class TimeUp(Exception):
    """The audit's time is over."""


class TimeLimit:
    """The time that an audit may take; None is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raise ``TimeUp`` if no time is left."""
        if self.left() <= 0:
            raise TimeUp


class Breakdown(EndpointError):
    """The server fails at a request (HTTP 5xx)."""


class PromptSource(Protocol):
    """Completes prompts, with fields of ``/v1/completions``; a reference drafts nothing."""

    @property
    def name(self) -> str: ...

    async def complete(self, prompt: Given, tokens: int, **fields: Any) -> EndpointCompletion: ...

    async def close(self) -> None: ...


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order; the first error ends the other calls."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AuditedServer:
    """A server with OpenAI's API at a URL; if ``model`` is None, the server is asked for one."""

    def __init__(
        self, url: str, model: str | None, key: str | None, clock: TimeLimit | None = None
    ) -> None:
        self.client = Client(url, key)
        self.clock = clock or TimeLimit(None)
        self.name = self.client.url
        self.model = model or ""
        self.requests = 0
        self.fields: dict[str, Any] = {}
        self.has_switch = False
        self.tells_tokens = False
        self._free = asyncio.Semaphore(REQUESTS_AT_ONCE)

    @property
    def telling(self) -> dict[str, Any]:
        """The field that asks for an answer's tokens, if the server reports them."""
        return {"logprobs": 1} if self.tells_tokens else {}

    async def open(self) -> None:
        """Find the model, the known fields, what is reported, and any switch; or raise."""
        self.model = self.model or await self.client.model()
        for fields in (PLAIN_FIELDS | NEUTRAL_FIELDS, PLAIN_FIELDS):
            self.fields = dict(fields)
            try:
                await self.complete("Hello", 1)
                break
            except RefusedRequest:
                if fields == PLAIN_FIELDS:
                    raise
        with suppress(RefusedRequest):
            self.tells_tokens = bool((await self.complete("Hello", 1, logprobs=1)).tokens)
        self.has_switch = await self._find_switch()

    async def _find_switch(self) -> bool:
        """Return True if there is Outrider's switch; others refuse the path, or answer any."""
        path = "/v1/speculation"
        answer = await self._patiently(path)
        failed = answer.status >= 500 and answer.status not in REFUSAL_CODES
        if failed or answer.status in BUSY_CODES:
            raise Breakdown(f"{self.name}{path} says HTTP {answer.status}: {_reason(answer.body)}")
        with suppress(ValueError):
            switch = parsed(answer.body)
            return answer.ok and isinstance(switch, dict) and "enabled" in switch
        return False

    async def complete(self, prompt: Given, tokens: int, **fields: Any) -> EndpointCompletion:
        """Return the first choice of an answer of ``/v1/completions``; raises as ``choices``."""
        return (await self.choices(prompt, tokens, **fields))[0]

    async def choices(self, prompt: Given, tokens: int, **fields: Any) -> list[EndpointCompletion]:
        """Return an answer of ``/v1/completions``; raises as ``post``, or if it is not OpenAI's."""
        body = {"prompt": prompt, "max_tokens": tokens, **fields}
        return completions(*await self.post("/v1/completions", body))

    async def chat(self, text: str, tokens: int, **fields: Any) -> tuple[str, str | None]:
        """Return text and finish reason of an answer of ``/v1/chat/completions``."""
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": tokens, **fields}
        return message(*await self.post("/v1/chat/completions", body))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[bytes, str]:
        """Return an answer's body, and the address that gave it.

        Raises RefusedRequest: the server does not accept it; Breakdown: the server fails at it;
        EndpointError: there is no answer, or the key is refused; TimeUp.
        """
        answer = await self._patiently(path, {"model": self.model, **self.fields, **body})
        where = self.name + path
        if not answer.ok:
            refuses = answer.status in REFUSAL_CODES
            breaks = Breakdown if answer.status >= 500 else EndpointError
            kind = RefusedRequest if refuses else breaks
            raise kind(f"{where} says HTTP {answer.status}: {_reason(answer.body)}")
        return answer.body, where

    async def _patiently(self, path: str, body: dict[str, Any] | None = None) -> StampedAnswer:
        """Return an answer; a busy server is asked again a few times. Raises as ``post``."""
        self.clock.check()
        async with self._free:
            for pause in range(RETRIES):
                self.requests += 1
                answer = await self.client.ask(path, body, ANSWER_SECONDS)
                if answer.status not in BUSY_CODES:
                    break
                await asyncio.sleep(PAUSE_SECONDS * 2**pause)
                self.clock.check()
        return answer

    async def close(self) -> None:
        await self.client.close()


class WithoutSpeculation:
    """The server under audit, with speculation off, or asked for one token at a time."""

    def __init__(self, server: AuditedServer) -> None:
        self.server = server

    @property
    def name(self) -> str:
        """Return how drafting is avoided, which is known once the server is open."""
        if self.server.has_switch:
            return "the server, with speculation off"
        return "the server, one token a request, so that nothing is drafted"

    async def complete(self, prompt: Given, tokens: int, **fields: Any) -> EndpointCompletion:
        if self.server.has_switch:
            fields["speculation"] = {"enabled": False}
        return await self.server.complete(prompt, tokens, **fields)

    async def chat(self, text: str, tokens: int, **fields: Any) -> tuple[str, str | None]:
        """Return text and finish reason of a chat's answer, with speculation switched off."""
        return await self.server.chat(text, tokens, speculation={"enabled": False}, **fields)

    async def close(self) -> None:
        """Leave the server to its owner."""


class Local:
    """A model on this machine, decoded plainly."""

    def __init__(self, model: str) -> None:
        from ...async_llm import AsyncLLM

        self.name = f"the model {model}, decoded plainly on this machine"
        self._llm = AsyncLLM(model, drafter=None)

    async def open(self) -> None:
        await self._llm.start()

    async def complete(self, prompt: Given, tokens: int, **fields: Any) -> EndpointCompletion:
        """Return the completion; only fields that are options of ``SamplingParams`` are used."""
        from ...params import SamplingParams

        params = SamplingParams(max_tokens=tokens, **fields)
        given = prompt if isinstance(prompt, str) else list(prompt)
        try:
            async for step in self._llm.generate(given, params):
                last = step
        except RequestError as error:
            raise RefusedRequest(f"{self.name}: {error}") from None
        out = last.outputs[0]
        prompt_ids = tuple(last.prompt_token_ids)
        decode = self._llm.inputs.outputs.decode
        said = tuple(Token(decode([id]), id) for id in out.token_ids)
        tops = out.logprobs[0] if out.logprobs else {}
        named = [(Token(each.decoded_token or "", id), each.logprob) for id, each in tops.items()]
        return EndpointCompletion(
            out.text, out.finish_reason, said, law_of(named) if named else None,
            len(prompt_ids), len(out.token_ids), prompt_ids,
        )  # fmt: skip

    async def close(self) -> None:
        self._llm.shutdown()


def _reason(body: bytes) -> str:
    """Return the message in an error's body, as one line."""
    with suppress(ValueError, LookupError, TypeError):
        value = parsed(body)
        error = value.get("error", value) if isinstance(value, dict) else value
        return shown(error["message"] if isinstance(error, dict) else error)
    return shown(body[:100].decode("utf-8", "replace"))
