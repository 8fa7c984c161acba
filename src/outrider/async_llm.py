"""The door for asyncio: ``AsyncLLM``, in the manner of vLLM's, over an engine in a process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import pickle
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from .engine.worker import (
    Abort,
    Add,
    Command,
    Failed,
    Gauges,
    Message,
    Ready,
    Refused,
    SpeculationState,
    Stepped,
    Stop,
    WorkerSpec,
    run_worker,
)  # fmt: skip
from .errors import ConfigError, OutriderError, RequestError, WorkerError
from .intake import Intake, Prompt, of_engine_args
from .models.families import Folder
from .outputs import GenerationError, Pending, RequestOutput
from .text.detokenize import Detokenizer
from .types import Event, Request, SamplingParams, Speculation, by_request

logger = logging.getLogger("outrider")

DEATHS, WITHIN_SECONDS = 3, 60.0
"""So many deaths of the worker in so short a time, and it is not started again."""
STOP_SECONDS = 10.0

Observer = Callable[[Stepped, Mapping[str, Sequence[Event]]], None]
"""Is told of every step, with its events by their request."""


class _Stream:
    """A request under way: what the worker sent of it, and its text."""

    def __init__(self, request: Request, intake: Intake) -> None:
        self.request = request
        self.queue: asyncio.Queue[list[Event] | OutriderError] = asyncio.Queue()
        self.left = request.params.n
        tokenizer = intake.codec.backend if intake.codec and not request.params.stop else None
        self._texts = [
            Detokenizer(
                tokenizer,
                request.prompt_token_ids,
                (),
                skip_special=request.params.skip_special_tokens,
            )
            for _ in range(self.left)
        ]
        self._written = tokenizer is not None
        self._worded = intake.worded

    def put(self, events: list[Event]) -> None:
        """Hand on the events of one step."""
        self.left -= sum(event.finish_reason is not None for event in events)
        self.queue.put_nowait(events)

    def show(self, event: Event) -> Event:
        """The event with its text, and that of the tokens whose log probability it gives."""
        if self._written:
            event = event._replace(text=self._text(event))
        return self._worded(event)

    def _text(self, event: Event) -> str:
        found, token = self._texts[event.sample_index], event.token_id
        if token is None:
            return found.flush()
        hidden = event.finish_reason == "stop" and not (
            self.request.params.include_stop_str_in_output
        )
        text = "" if hidden else found.push(token)[0]
        return text if event.finish_reason is None else text + found.flush()


class AsyncLLM:
    """A model behind a worker process; for one event loop.

    A worker that dies takes its requests with it (``WorkerError``) and is started again, until it
    has died three times in a minute.

    Args:
        model, drafter, options: as ``LLM`` takes them.

    Raises:
        ConfigError, ModelError: see ``LLM``. What only the engine finds out, ``start`` raises.
    """

    def __init__(self, model: Folder, drafter: Folder | None = "auto", **options: Any) -> None:
        self.intake = Intake(model, drafter, options)
        self.config = self.intake.config
        self.spec = WorkerSpec(
            self.intake.folder, self.intake.tokenizer, self.intake.spec, self.config
        )
        self.ready: Ready | None = None
        self.gauges = Gauges()
        self.speculation: SpeculationState | None = None
        self.restarts = 0
        self.failure: OutriderError | None = None
        self.observers: list[Observer] = []
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count()
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._link: Connection | None = None
        self._changed = asyncio.Event()
        self._closing = False

    @classmethod
    def from_engine_args(cls, engine_args: Any = None, **options: Any) -> AsyncLLM:
        """From vLLM's ``AsyncEngineArgs``, or any object or mapping with such names.

        Of an object the attributes that are set and that ``LLM`` knows are taken; a mapping's and
        ``options`` must all be known.
        """
        given = engine_args or {}
        if not isinstance(given, dict):
            given = of_engine_args(given)
        return cls(**{**given, **options})

    def launch(self) -> None:
        """Start the worker unless it was started, without waiting for it."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._spawn()

    async def start(self) -> Ready:
        """Start the worker unless it runs, and wait until it has decoded something.

        Raises:
            OutriderError: it cannot be loaded, or died too often.
        """
        self.launch()
        while self.ready is None:
            if self.failure is not None:
                raise self.failure
            changed = self._changed
            await changed.wait()
        return self.ready

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        speculation: Speculation | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt; yields the output so far, again after every step of the engine.

        Leaving the iterator aborts the request.

        Args:
            prompt: a text, token ids, or ``{"prompt_token_ids": ids}``.
            sampling_params: None takes the defaults.
            request_id: unique among those under way; made up unless given.
            speculation: what the request wants of drafting; None takes the engine's way.
            priority: of waiting requests the lowest go first.

        Raises:
            RequestError, ConfigError: the request cannot be served.
            WorkerError: the engine died under it.
            GenerationError: the request failed on the way; the error holds its output.
        """
        params = sampling_params or SamplingParams()
        request, text = self.request(prompt, params, request_id)
        request = replace(request, speculation=speculation or Speculation(), priority=priority)
        pending = Pending(text, request)
        async for events in self.stream(request):
            for event in events:
                pending.take(event)
            if pending.error is not None:
                raise GenerationError(f"the request failed: {pending.error}", [pending.output()])
            yield pending.output()

    def request(
        self, prompt: Prompt, params: SamplingParams, id: str | None = None
    ) -> tuple[Request, str | None]:
        """A request for ``stream``, and its prompt's text, None where ids were given.

        Raises:
            RequestError: the prompt is neither text nor ids, or text without a tokenizer.
        """
        name = f"request-{next(self._numbers)}" if id is None else id
        request, text = self.intake.request(prompt, params, name)
        return replace(request, detokenize=False), text

    async def stream(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """The events of a request, those of a step together.

        Leaving the iterator aborts the request.

        Raises:
            RequestError, ConfigError: the request cannot be served.
            WorkerError: the engine died under it, or does not run.
        """
        await self.start()
        if request.id in self._streams:
            raise RequestError(f"request id {request.id!r} is in use; give another.")
        stream = self._streams[request.id] = _Stream(request, self.intake)
        self._send(Add(request))
        try:
            while stream.left or not stream.queue.empty():
                found = await stream.queue.get()
                if isinstance(found, OutriderError):
                    stream.left = 0
                    raise found
                if any(event.prompt_logprobs is not None for event in found):
                    found = await asyncio.to_thread(lambda new: [*map(stream.show, new)], found)
                    yield found
                else:
                    yield [stream.show(event) for event in found]
        finally:
            del self._streams[request.id]
            if stream.left:
                self._send(Abort(request.id))

    async def set_speculation(self, state: SpeculationState) -> None:
        """Draft in another way from the next step on.

        Raises:
            ConfigError: there is no such drafter, or the length is out of range.
        """
        ready = await self.start()
        if state.drafter not in ready.drafters:
            known = ", ".join(ready.drafters)
            raise ConfigError(f"drafter is {state.drafter!r}; give one of {known}.")
        if not 1 <= state.num_speculative_tokens <= ready.max_draft:
            raise ConfigError(
                f"num_speculative_tokens is {state.num_speculative_tokens}; "
                f"give 1 to {ready.max_draft}."
            )
        self.speculation = state
        self._send(state)

    @property
    def live(self) -> int:
        """How many requests are under way."""
        return len(self._streams)

    def kill(self) -> None:
        """End the worker at once, whatever it does."""
        self._closing = True
        if self._process is not None:
            self._process.kill()

    def shutdown(self) -> None:
        """End the worker; requests under way fail."""
        self._closing = True
        self._send(Stop())
        if self._process is not None:
            self._process.join(STOP_SECONDS)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        if self._link is not None:
            self._link.close()
        self._end_streams("the engine was shut down")

    def _spawn(self) -> None:
        """Start a worker and the thread that reads what it sends."""
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe()
        self._process = context.Process(
            target=run_worker, args=(its, self.spec), name="outrider-engine", daemon=True
        )
        self._process.start()
        its.close()
        self._link = mine
        threading.Thread(
            target=self._read, args=(mine, self._process), name="outrider-events", daemon=True
        ).start()

    def _read(self, link: Connection, process: multiprocessing.process.BaseProcess) -> None:
        """In a thread of its own: hand over every message to the event loop, the end too."""
        assert self._loop is not None
        call = self._loop.call_soon_threadsafe
        try:
            while True:
                try:
                    message: Message = pickle.loads(link.recv_bytes())
                except (EOFError, OSError):
                    break
                call(self._take, message)
            process.join()
            call(self._died, process.exitcode)
        except RuntimeError:  # the loop is closed
            return

    def _take(self, message: Message) -> None:
        """Hand a message to whom it concerns."""
        match message:
            case Stepped(events, gauges):
                self.gauges = gauges
                found = by_request(events)
                self._hand_out(found)
                for observe in self.observers:
                    observe(message, found)
            case Gauges():
                self.gauges = message
            case Refused(id, error):
                stream = self._streams.get(id)
                if stream is not None:
                    stream.queue.put_nowait(error)
            case Ready():
                self.ready = message
                if self.speculation is None:
                    self.speculation = message.speculation
                elif self.speculation != message.speculation:
                    self._send(self.speculation)  # what was set outlives a worker
                self._tell()
            case Failed(error):
                self.failure = error
                self._tell()
            case SpeculationState():
                self.speculation = message

    def _hand_out(self, events: Mapping[str, list[Event]]) -> None:
        """Each request's events to its stream."""
        for id, mine in events.items():
            stream = self._streams.get(id)
            if stream is not None:
                stream.put(mine)

    def _died(self, code: int | None) -> None:
        """The worker is gone: end its requests, and start another unless that does not help."""
        self.ready, self.gauges = None, Gauges()
        if self._closing or self.failure is not None:
            return
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        logger.error("the engine %s", how)
        self._end_streams(f"the engine {how} while the request ran")
        now = time.monotonic()
        self._deaths.append(now)
        if len(self._deaths) == DEATHS and now - self._deaths[0] < WITHIN_SECONDS:
            self.failure = WorkerError(
                f"the engine died {DEATHS} times within {WITHIN_SECONDS:.0f} s, the last time it "
                f"{how}; see the log for the reason."
            )
            self._tell()
            return
        self.restarts += 1
        self._spawn()

    def _tell(self) -> None:
        """Wake whoever waits for the worker's state to change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_streams(self, why: str) -> None:
        for stream in self._streams.values():
            stream.queue.put_nowait(WorkerError(f"{why}; send it again."))

    def _send(self, command: Command) -> None:
        if self._link is not None:
            try:
                self._link.send_bytes(pickle.dumps(command, pickle.HIGHEST_PROTOCOL))
            except OSError:  # it is dead, and the reading thread will say so
                return
