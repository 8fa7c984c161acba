"""The common part of completions and chats: the call, its requests, and the answer's frame."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from fastapi import Request as HttpRequest

from ..engine.suspects import fingerprint
from ..errors import shown
from ..outputs import RequestState
from ..sampling.acceptance import NOT_FINITE
from ..types import Counts, Event
from .admission import Lease
from .answer import metrics, seed_of, usage
from .bodies import LONG_BODY
from .errors import Refusal
from .protocol import Generation
from .service import Service
from .settings import Settings

LONG_LIST = 1 << 9
"""Positions with log probabilities from which on an answer is made in a thread."""

Body = TypeVar("Body", bound=Generation)
T = TypeVar("T")


def cache_salt(settings: Settings, salt: str, key: int | None) -> str:
    """Return the salt of a request: with several keys each has a prefix cache of its own."""
    apart = len(settings.api_keys) > 1 and not settings.share_prefix_cache
    return f"{key}\0{salt}" if apart else salt


class ApiCall(ABC, Generic[Body]):
    """One call: its body, and the state of a request for each prompt.

    ``error`` says what ended its stream.
    """

    prefix: str
    """The beginning of its id."""

    def __init__(self, service: Service, body: Body, http: HttpRequest) -> None:
        if body.stream and body.prompt_logprobs is not None:
            raise Refusal(
                "prompt_logprobs are not sent in a stream; leave out stream.", "prompt_logprobs"
            )
        self.service = service
        self.body = body
        self.salt = cache_salt(service.settings, body.cache_salt or "", http.state.key)
        self.id = f"{self.prefix}-{body.request_id or http.state.request_id}"
        self.error: str | None = None
        self.created = int(time.time())
        self.states: list[RequestState] = []
        self.shown_to_end = 0  # choices of a stream
        self.long: bool = http.state.body_bytes >= LONG_BODY
        self.lease = Lease(service.queue, 0)

    @property
    def lists_much(self) -> bool:
        """True when the answer lists so much besides its text that it takes long to make."""
        listed = sum(len(s.logprobs) for r in self.states for s in r.samples)
        return listed + sum(len(r.prompt_logprobs or ()) for r in self.states) > LONG_LIST

    def runs(self) -> list[AsyncGenerator[list[Event], None]]:
        """Return the runs of the call's requests, each of which yields the events of a step.

        The engine knows a call that kills it by the fingerprint of all its requests.

        Raises:
            OutriderError: a request cannot be served, or failed.
            Refusal: 408, it took longer than allowed.
        """
        body = fingerprint(state.request for state in self.states)
        limits = (self.body.timeout, self.service.settings.request_timeout)
        timeout = min((t for t in limits if t is not None), default=None)
        return [self._run(state, body, timeout) for state in self.states]

    async def _run(
        self, state: RequestState, body: str, timeout: float | None
    ) -> AsyncGenerator[list[Event], None]:
        """Run one request; its sequences leave the queue with their first tokens."""
        service, request = self.service, state.request
        tokens, count = len(request.prompt_token_ids), request.params.n
        deadline = None if timeout is None else time.monotonic() + timeout
        service.metrics.begin(request)
        try:
            async with aclosing(service.llm.run(state, body)) as stream:
                while True:
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    try:
                        events = await asyncio.wait_for(anext(stream), left)
                    except StopAsyncIteration:
                        service.stats.add(state)
                        return
                    except TimeoutError:
                        raise Refusal(
                            f"the request took longer than {timeout:g} s; raise its timeout "
                            "or ask for fewer tokens.", status=408, code="timeout",
                        ) from None  # fmt: skip
                    started = sum(event.start is not None for event in events)
                    if started:
                        self.lease.give_back(started, tokens)
                        count, tokens = count - started, 0
                    if state.error is not None:
                        # Logits that are not finite are the model's fault, all else the options'.
                        code = 500 if state.error == NOT_FINITE else 400
                        raise Refusal(f"the request failed: {state.error}", status=code)
                    yield events
        finally:
            self.lease.give_back(count, tokens)
            service.metrics.end(request.id)

    @abstractmethod
    async def prepare(self) -> None:
        """Make the requests of the call.

        Raises:
            OutriderError: they cannot be served.
        """

    @abstractmethod
    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Run the call; yield the chunks of its stream."""

    @abstractmethod
    def build(self) -> dict[str, Any]:
        """Return the whole answer, once every request has run."""

    def truncated(self, ids: list[int]) -> list[int]:
        """Return the end of a prompt, or its beginning, as ``truncate_prompt_tokens`` asks.

        Raises:
            Refusal: the number is out of its range.
        """
        most, context = self.body.truncate_prompt_tokens, self.service.llm.inputs.max_model_len
        if most is None:
            return ids
        if most == 0 or not -1 <= most <= context:
            raise Refusal(
                f"truncate_prompt_tokens is {shown(most)}; give 1 to {context}, or -1 for "
                "all that the context holds.", "truncate_prompt_tokens",
            )  # fmt: skip
        if most == -1:
            most = max(1, context - max(1, self.body.limit or 1))
        if len(ids) <= most:
            return ids
        return ids[-most:] if self.body.truncation_side == "left" else ids[:most]

    def head(self, kind: str) -> dict[str, Any]:
        """Return the first fields of every answer and chunk of ``kind``."""
        return {
            "id": self.id, "object": kind, "created": self.created,
            "model": self.body.model or self.service.name,
            "system_fingerprint": self.service.settings.fingerprint,
        }  # fmt: skip

    def figures(self) -> dict[str, Any]:
        """Return the seed that was used, and the figures of speculation."""
        settings = self.service.settings
        return {
            "seed": seed_of(self.states[0].request),
            "metrics": metrics(self.states, settings.longest, settings.detail),
        }

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's ``usage`` of the call."""
        return usage(self.states)

    def chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a part of a stream; the one that ends its last choice has figures."""
        chunk = {**self.head(kind), "choices": [choice]}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            chunk["usage"] = self.usage() if options.continuous_usage_stats else None
        if choice["finish_reason"]:
            self.shown_to_end += 1
            if self.shown_to_end == sum(len(r.samples) for r in self.states):
                chunk |= self.figures()
        return chunk

    def last_chunks(self, kind: str) -> list[dict[str, Any]]:
        """Return the chunk of usage that ends a stream, if the call asks for one."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return []
        return [{**self.head(kind), "choices": [], **self.figures(), "usage": self.usage()}]

    def facts(self) -> dict[str, Any]:
        """Return the fields of the call's line in the log and of its span; None where unknown."""
        body, samples = self.body, [s for r in self.states for s in r.samples]
        drafts = [draft for s in samples for draft in s.drafts]
        counts = Counts(
            drafts=len(drafts),
            drafted=sum(draft.depth for draft in drafts),
            accepted=sum(sum(s.accepted) for s in samples),
        )
        firsts = [r.ttft for r in self.states if r.ttft is not None]
        queued = [r.queued for r in self.states if r.queued is not None]
        used = self.usage()
        return {
            "id": self.id, "model": body.model, "served_model": self.service.name,
            "prompt_tokens": used["prompt_tokens"], "completion_tokens": used["completion_tokens"],
            "finish_reasons": [s.finish_reason for s in samples if s.finish_reason] or None,
            "stream": body.stream, "n": body.n, "max_tokens": body.limit,
            "temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k,
            "frequency_penalty": body.frequency_penalty, "presence_penalty": body.presence_penalty,
            "queue_seconds": min(queued, default=None), "ttft_seconds": min(firsts, default=None),
            "drafted": counts.drafted, "accepted": counts.accepted,
            "acceptance_length": counts.acceptance_length, "error": self.error,
        }  # fmt: skip


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of streams as they come, each with its stream's number.

    The streams run ahead of the consumer.
    """
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((number, item))
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            if isinstance(error, asyncio.CancelledError):
                raise

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            numbered = await queue.get()
            if isinstance(numbered, BaseException):
                raise numbered
            if numbered is None:
                left -= 1
                continue
            yield numbered
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
