"""From a body to the engine and back: admission, requests, and their events as they come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import Request as Call

from ..async_llm import AsyncLLM
from ..errors import ConfigError, shown
from ..outputs import Pending
from ..sampling.acceptance import NOT_FINITE
from ..text.codec import TextCodec, has_lone_surrogates
from ..types import Event
from .admission import Lease, Queue
from .errors import ServerError
from .messages import readable, template_options, wants_generation_prompt
from .metrics import Metrics
from .protocol import ChatRequest, CompletionRequest, Refusal, Templated, Tool
from .settings import Settings
from .stats import Stats

T = TypeVar("T")
LONG_TEXT = 1 << 14
"""Characters from which on a text is tokenised in a thread, so that other calls go on."""
SURE_TEXT = 1 << 18
"""Bytes from which on a text's tokens are counted before it is tokenised as a whole."""
SLOW_THREADS = 2
"""Threads for long texts; more of them would take more memory at a time."""
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
    queue: Queue = field(init=False)
    threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        limits = self.settings
        self.queue = Queue(limits.max_queued_requests, limits.max_queued_tokens)
        self.threads = ThreadPoolExecutor(SLOW_THREADS, "outrider-texts")

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

    def admit(self, sequences: int) -> Lease:
        """Have a call's sequences wait, before anything of it is computed.

        Raises:
            ServerError: 429 for a full queue, 503 while the server drains or the engine starts.
        """
        if self.draining:
            raise ServerError(503, "the server is shutting down; send the call elsewhere.")
        if self.llm.ready is None:
            raise ServerError(503, "the engine is starting; send the call again.")
        return self.queue.enter(sequences)

    async def slow(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, in one of a few threads: many at once take little memory."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

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
        return await self.slow(partial(self._encode, codec, prompt, special))

    def _encode(self, codec: TextCodec, text: str, special: bool) -> list[int]:
        """The ids of a text that may be long.

        Raises:
            Refusal: it has more than the context holds.
        """
        most = self.llm.intake.max_model_len
        if len(text.encode()) > SURE_TEXT and codec.exceeds(text, most):
            raise Refusal(
                f"the text has {len(text)} characters, more than a context of {most} tokens holds; "
                "shorten it.", "prompt",
            )  # fmt: skip
        return codec.encode(text, special)

    def salt(self, given: str | None, call: Call) -> str:
        """Returns what keeps a request's cached prefix from others: its salt, and its key."""
        apart = len(self.settings.api_keys) > 1 and not self.settings.share_prefix_cache
        return f"{call.state.key}\0{given or ''}" if apart else given or ""

    async def chat_ids(
        self,
        messages: list[dict[str, Any]],
        tools: list[Tool],
        body: Templated,
        long: bool,
    ) -> list[int]:
        """A conversation's token ids, by the chat template, in a thread where it is ``long``.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        codec = self.llm.intake.codec
        if codec is None:
            raise Refusal("this model has no tokenizer, so it cannot chat.", "messages")
        given = template_options(body, str(codec.template))
        prompted = wants_generation_prompt(body)
        listed = [tool.model_dump(exclude_none=True) for tool in tools]

        def work() -> list[int]:
            text = codec.render(readable(messages), prompted, listed, **given)
            return self._encode(codec, text, False)

        return await self.slow(work) if long else work()

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids.

        Raises:
            Refusal: one of them is not in the vocabulary, or there are more than the context holds.
        """
        size, most = self.llm.intake.vocab_size, self.llm.intake.max_model_len
        if len(ids) > most:
            raise Refusal(f"there are {len(ids)} tokens; give at most {most}.", "tokens")
        wrong = next((id for id in ids if not 0 <= id < size), None)
        if wrong is not None:
            raise Refusal(f"token id {shown(wrong)} is not in the vocabulary of {size}.", "tokens")
        return await self.slow(partial(self.llm.intake.decode, ids))

    async def run(
        self, answer: Pending, timeout: float | None, lease: Lease
    ) -> AsyncIterator[list[Event]]:
        """The events of one prompt, collected in ``answer`` on the way.

        Its sequences leave ``lease`` with their first tokens.

        Raises:
            OutriderError: it cannot be served, or failed.
            ServerError: 408, it took longer than ``timeout`` seconds.
        """
        tokens, count = len(answer.request.prompt_token_ids), answer.request.params.n
        limits = [t for t in (timeout, self.settings.request_timeout) if t is not None]
        timeout = min(limits, default=None)
        deadline = None if timeout is None else time.monotonic() + timeout
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
                            lease.give_back(1, tokens)
                            count, tokens = count - 1, 0
                    if answer.error is not None:
                        # All but broken logits comes of options that contradict each other.
                        code = 500 if answer.error == NOT_FINITE else 400
                        raise ServerError(code, f"the request failed: {answer.error}")
                    yield events
        finally:
            lease.give_back(count, tokens)
            self.metrics.end(answer.request.id)

    async def finish(self, answer: Pending, timeout: float | None, lease: Lease) -> None:
        """Run one prompt to its end.

        Raises:
            OutriderError: see ``run``.
        """
        async for _ in self.run(answer, timeout, lease):
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
