"""From a body to the engine and back: admission, requests, and their events as they come."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request as Call

from ..async_llm import AsyncLLM
from ..errors import ConfigError, shown
from ..outputs import Pending
from ..params import DEFAULT_MAX_TOKENS
from ..sampling.acceptance import NOT_FINITE
from ..text.template import has_lone_surrogates
from ..types import Event, Request, SamplingParams, Speculation
from .errors import ServerError
from .messages import readable, template_options, wants_generation_prompt
from .metrics import Metrics
from .protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Refusal,
    Templated,
    Tool,
)  # fmt: skip
from .settings import Settings
from .stats import Stats

T = TypeVar("T")
LONG_TEXT = 1 << 14
"""Characters from which on a text is tokenised in a thread, so that other calls go on."""
LETTERS = 16
"""More than a token has, on average, of any text that is expected."""
GONE = 499
"""What the log says of a client that went away."""


@dataclass
class Service:
    """What every call needs: the engine and the limits."""

    llm: AsyncLLM
    settings: Settings
    metrics: Metrics
    stats: Stats = field(default_factory=Stats)
    draining: bool = False
    waiting: int = 0
    waiting_tokens: int = 0

    @property
    def name(self) -> str:
        """The model, as clients call it."""
        return self.settings.names[0]

    def check_model(self, given: str | None) -> None:
        """Refuse another model than the one that is served.

        Raises:
            ServerError: 404.
        """
        if given is not None and given not in self.settings.names:
            raise ServerError(
                404, f"there is no model {shown(given)} here; this server has {self.name!r}.",
                "model", "model_not_found",
            )  # fmt: skip

    def admit(self, requests: list[Request]) -> None:
        """Refuse what would have to wait behind too much.

        Raises:
            ServerError: 429 for a full queue, 503 while the server drains.
        """
        if self.draining:
            raise ServerError(503, "the server is shutting down; send the call elsewhere.")
        if self.llm.ready is None:
            raise ServerError(503, "the engine is starting; send the call again.")
        limit = self.settings
        count = sum(r.params.n for r in requests)
        if self.waiting and self.waiting + count > limit.max_queued_requests:
            raise ServerError(
                429, f"{self.waiting} sequences wait already, and the queue holds "
                f"{limit.max_queued_requests}; try again later.", code="queue_full",
            )  # fmt: skip
        tokens = sum(len(r.prompt_token_ids) for r in requests)
        if self.waiting_tokens and self.waiting_tokens + tokens > limit.max_queued_tokens:
            raise ServerError(
                429, f"requests of {self.waiting_tokens} prompt tokens wait already, and the "
                f"limit is {limit.max_queued_tokens}; try again later.", code="queue_full",
            )  # fmt: skip

    async def ids(self, prompt: str | list[int], special: bool = True) -> list[int]:
        """A prompt's token ids.

        Raises:
            Refusal: a text, and the model has no tokenizer.
        """
        if not isinstance(prompt, str):
            return prompt
        codec = self.llm.intake.codec
        if codec is None:
            raise Refusal("this model has no tokenizer; give prompts as token ids.", "prompt")
        if has_lone_surrogates(prompt):
            raise Refusal("the prompt has lone surrogates; send UTF-8.", "prompt")
        if len(prompt) < LONG_TEXT:
            return codec.encode(prompt, special)
        return await asyncio.to_thread(codec.encode, prompt, special)

    def salt(self, given: str | None, call: Call) -> str:
        """Returns what keeps a request's cached prefix from others: its salt, and its key."""
        apart = len(self.settings.api_keys) > 1 and not self.settings.share_prefix_cache
        return f"{call.state.key}\0{given or ''}" if apart else given or ""

    async def chat_ids(
        self,
        messages: list[dict[str, Any]],
        tools: list[Tool],
        body: Templated,
    ) -> list[int]:
        """A conversation's token ids, by the chat template, in a thread where it is long.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        codec = self.llm.intake.codec
        if codec is None:
            raise Refusal("this model has no tokenizer, so it cannot chat.", "messages")
        given = template_options(body, str(codec.template))
        prompted = wants_generation_prompt(body)
        read, listed = readable(messages), [tool.as_json() for tool in tools]
        work = partial(codec.chat, read, prompted, listed, **given)
        size = sum(len(message["content"]) for message in read)
        return work() if size < LONG_TEXT else await asyncio.to_thread(work)

    def decode(self, ids: list[int]) -> str:
        """The text of token ids.

        Raises:
            Refusal: one of them is not in the vocabulary.
        """
        size = self.llm.intake.vocab_size
        wrong = next((id for id in ids if not 0 <= id < size), None)
        if wrong is not None:
            raise Refusal(f"token id {wrong} is not in the vocabulary of {size}.", "tokens")
        return self.llm.intake.decode(ids)

    async def request(self, body: Generation, ids: list[int], salt: str, **more: Any) -> Request:
        """The engine's request for one prompt of a call.

        ``salt`` keeps its cached prefix from others, and ``more`` goes to ``SamplingParams``.

        Raises:
            OutriderError: it cannot be served.
        """
        room = self.llm.intake.max_model_len - len(ids)
        if body.limit is None and self.llm.ready is not None:
            room = min(room, max(1, self.llm.ready.num_tokens - len(ids)))
        if room < 1:
            raise Refusal(
                f"the prompt has {len(ids)} tokens, which leaves no room in a context of "
                f"{self.llm.intake.max_model_len}; shorten it.", "prompt",
            )  # fmt: skip
        context = self.llm.intake.max_model_len
        if "max_tokens" not in more and (body.limit or 0) > max(context, DEFAULT_MAX_TOKENS):
            chats = getattr(body, "max_completion_tokens", None) is not None
            name = "max_completion_tokens" if chats else "max_tokens"
            raise Refusal(
                f"{name} is {shown(body.limit)}, but the context of this model is {context} "
                "tokens; give at most that.", name,
            )  # fmt: skip
        if body.priority and self.llm.config.scheduling_policy != "priority":
            raise Refusal(
                f"priority is {body.priority}, but priority scheduling is not enabled; give 0, or "
                "start the server with --scheduling-policy priority.", "priority",
            )  # fmt: skip
        params: SamplingParams = body.sampling(room, self.settings.defaults, **more)
        request, _ = self.llm.request(ids, params, uuid.uuid4().hex)
        return replace(
            request,
            speculation=await self._speculation(body),
            priority=body.priority,
            cache_salt=salt,
        )

    async def _speculation(self, body: Generation) -> Speculation:
        given = body.speculation
        expected: tuple[int, ...] = ()
        if body.prediction is not None:
            # No output is longer; what an output does not reach costs every step that looks for it.
            most = self.llm.intake.max_model_len
            text = body.prediction.text[: most * LETTERS]
            ids = await self.ids(text, special=False)
            # A tokenizer may know ids that the model lacks, which no output has.
            known = self.llm.intake.vocab_size
            expected = tuple(id for id in ids[:most] if id < known)
        if given is None:
            return Speculation(prediction=expected)
        return Speculation(given.enabled, given.drafter, given.num_speculative_tokens, expected)

    async def run(self, answer: Pending, timeout: float | None) -> AsyncIterator[list[Event]]:
        """The events of one prompt, collected in ``answer`` on the way.

        Raises:
            OutriderError: it cannot be served, or failed.
            ServerError: 408, it took longer than ``timeout`` seconds.
        """
        tokens, count = len(answer.request.prompt_token_ids), answer.request.params.n
        limits = [t for t in (timeout, self.settings.request_timeout) if t is not None]
        timeout = min(limits, default=None)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._wait(count, tokens)
        self.metrics.begin(answer.request)
        try:
            async with contextlib.aclosing(self.llm.stream(answer.request)) as stream:
                while True:
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    try:
                        events = await asyncio.wait_for(anext(stream), left)
                    except StopAsyncIteration:
                        self.stats.add(answer)
                        return
                    except TimeoutError:
                        raise ServerError(
                            408, f"the request took longer than {timeout:g} s; raise its timeout "
                            "or ask for fewer tokens.", code="timeout",
                        ) from None  # fmt: skip
                    for event in events:
                        answer.take(event)
                        if event.start is not None:
                            self._wait(-1, -tokens)
                            count, tokens = count - 1, 0
                    if answer.error is not None:
                        # All but broken logits comes of options that contradict each other.
                        code = 500 if answer.error == NOT_FINITE else 400
                        raise ServerError(code, f"the request failed: {answer.error}")
                    yield events
        finally:
            self._wait(-count, -tokens)
            self.metrics.end(answer.request.id)

    def _wait(self, sequences: int, tokens: int) -> None:
        """So many more wait for their first token."""
        self.waiting += sequences
        self.waiting_tokens += tokens

    async def finish(self, answer: Pending, timeout: float | None) -> None:
        """Run one prompt to its end.

        Raises:
            OutriderError: see ``run``.
        """
        async for _ in self.run(answer, timeout):
            pass


async def unless_gone(call: Call, work: Awaitable[T]) -> T:
    """``work``, cancelled as soon as the client is gone.

    Raises:
        ServerError: the client is gone.
    """
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await call.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(watch())
    try:
        done, _ = await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise ServerError(GONE, "the client went away.")
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(BaseException):
                await task


async def merged(streams: list[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Several streams as one, each item with its stream's number."""
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[T]) -> None:
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
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
                continue
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_best(error: ConfigError) -> Refusal:
    """A wrong option of a request as its client knows it: the field's own name."""
    text = str(error).removeprefix("SamplingParams: ").removeprefix("StructuredOutputsParams ")
    field = text.partition(" ")[0]
    known = field in CompletionRequest.model_fields or field in ChatRequest.model_fields
    return Refusal(text, field if known else None)
