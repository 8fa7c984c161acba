"""The door for asyncio: ``AsyncLLM``, in the manner of vLLM's, over an engine in a process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .engine.deaths import Deaths
from .engine.process import WorkerProcess
from .engine.pulse import Beat, Watch
from .engine.speculation import SpeculationState
from .engine.suspects import Suspects, fingerprint
from .engine.worker import (
    Abort,
    Aborted,
    Add,
    Broken,
    Failed,
    Gauges,
    Logged,
    Message,
    Ready,
    Refused,
    Stepped,
    WorkerSpec,
)  # fmt: skip
from .errors import ConfigError, OutriderError, RequestError, WorkerError, shown
from .intake import Intake, Prompt, of_engine_args
from .models.families import Folder
from .outputs import GenerationError, Pending, RequestOutput
from .text.detokenize import Detokenizer
from .types import DEFAULT_SPECULATION, Event, Request, SamplingParams, Speculation, by_request

logger = logging.getLogger("outrider")

TICK_SECONDS = 1.0

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

    A worker that dies or hangs takes its requests with it (``WorkerError``) and is started again,
    until it has died three times in a minute without a request, or before it was ready. A request
    that ran alone at two deaths is refused.

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
        self._failing: list[Observer] = []
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count()
        self.suspects = Suspects()
        self._engaged: dict[str, str] = {}  # by id the body of each request the worker may hold
        self._deaths = Deaths()
        self._unstarted: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: WorkerProcess | None = None
        self._watch = Watch()
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
            self._loop.call_later(TICK_SECONDS, self._tick)

    async def start(self) -> Ready:
        """Start the worker unless it runs, and wait until it has decoded something.

        Raises:
            OutriderError: it cannot be loaded, died too often, or was shut down.
        """
        self.launch()
        while self.ready is None or self._closing:
            if self.failure is not None:
                raise self.failure
            if self._closing:
                raise WorkerError("the engine was shut down; make another.")
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
            priority: of waiting requests the lowest go first; needs
                ``scheduling_policy="priority"`` unless it is 0.

        Raises:
            RequestError, ConfigError: the request cannot be served.
            WorkerError: the engine died under it.
            GenerationError: the request failed on the way; the error holds its output.
        """
        params = sampling_params or SamplingParams()
        request, text = self.request(prompt, params, request_id)
        request = replace(
            request, speculation=speculation or DEFAULT_SPECULATION, priority=priority
        )
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
        await self._free(request.id)
        body = request.body or fingerprint([request])
        self.suspects.check(body)
        stream = self._streams[request.id] = _Stream(request, self.intake)
        try:
            self._add(request, body)
            while stream.left or not stream.queue.empty():
                found = await stream.queue.get()
                if isinstance(found, OutriderError):
                    stream.left = 0
                    raise found
                if any(event.prompt_logprobs is not None for event in found):
                    yield await asyncio.to_thread(lambda new: [*map(stream.show, new)], found)
                else:
                    yield [stream.show(event) for event in found]
            if body in self.suspects and body not in self._engaged.values():
                self.suspects.completed(body)
        finally:
            del self._streams[request.id]
            if stream.left:
                self._abort(request.id)

    async def _free(self, id: str) -> None:
        """Wait until the engine runs, and until an earlier request of this id has left it.

        Raises:
            RequestError: the id is in use.
            WorkerError: the engine does not run.
        """
        while True:
            await self.start()
            if id in self._streams:
                raise RequestError(f"request id {id!r} is in use; give another.")
            if id not in self._engaged:
                return
            await self._changed.wait()

    async def set_speculation(self, state: SpeculationState) -> None:
        """Draft in another way from the next step on.

        Raises:
            ConfigError: there is no such drafter, or the length is out of range.
        """
        ready = await self.start()
        if state.drafter not in ready.drafters:
            known = ", ".join(ready.drafters)
            raise ConfigError(f"drafter is {shown(state.drafter)}; give one of {known}.")
        if not 1 <= state.num_speculative_tokens <= ready.max_draft:
            raise ConfigError(
                f"num_speculative_tokens is {state.num_speculative_tokens}; "
                f"give 1 to {ready.max_draft}."
            )
        self.speculation = state
        self._set(state)

    @property
    def live(self) -> int:
        """How many requests are under way."""
        return len(self._streams)

    @property
    def trouble(self) -> OutriderError | None:
        """Why the engine cannot serve; None while it can, or is being loaded."""
        if self.failure is not None:
            return self.failure
        if self._unstarted is not None:
            return WorkerError(f"{self._unstarted}; it is tried again.")
        why = None if self._worker is None else self._watch.complaint
        return None if why is None else WorkerError(f"{why}; it is restarted if that goes on.")

    def shutdown(self) -> None:
        """End the worker at once, whatever it does; requests under way fail."""
        self._closing = True
        if self._worker is not None:
            self._worker.kill()
        self._end_streams("the engine was shut down")
        self._tell()

    def _spawn(self) -> None:
        """Start a worker; again later where the system cannot do it now."""
        assert self._loop is not None
        if self._closing:
            return
        call = self._loop.call_soon_threadsafe
        try:
            self._worker = WorkerProcess(
                self.spec,
                self.restarts,
                lambda worker, message: call(self._take, worker, message),
                lambda worker, code: call(self._died, worker, code),
            )
        except OSError as error:
            self._unstarted = f"the engine cannot be started ({error})"
            logger.error("%s; it is tried again", self._unstarted)
            self._deaths.unstarted()
            self._loop.call_later(self._deaths.pause, self._spawn)
        except Exception as error:
            self._fail(f"the engine cannot be started: {error}")
            raise
        else:
            self._unstarted = None
            self._deaths.started()
            self._watch.begin()

    def _tick(self) -> None:
        """Every second: kill a worker that hangs."""
        if self._closing or self.failure is not None or self._loop is None:
            return
        self._loop.call_later(TICK_SECONDS, self._tick)
        if self._worker is None:
            return
        self._watch.tick()
        if self._watch.hung:
            logger.error("%s; it is killed and started again", self._watch.complaint)
            self._worker.kill()

    def _add(self, request: Request, body: str) -> None:
        """Give the worker a request; one that has just died says so later."""
        if self._worker is not None:
            self._worker.send(Add(request), ("add", request.id))
            self._engaged[request.id] = body

    def _abort(self, id: str) -> None:
        """Have the worker drop a request, unless it never got it."""
        if self._worker is None or self._worker.withdraw(("add", id)):
            self._engaged.pop(id, None)
        else:
            self._worker.send(Abort(id), ("abort", id))

    def _set(self, state: SpeculationState) -> None:
        if self._worker is not None:
            self._worker.send(state, "speculation")

    def _take(self, worker: WorkerProcess, message: Message) -> None:
        """Hand a message to whom it concerns."""
        if worker is not self._worker:
            return
        match message:
            case Stepped(events, gauges):
                self.gauges = gauges
                found = by_request(events)
                self._hand_out(found)
                self._show(message, found)
            case Beat():
                self._watch.hear(message)
            case Aborted(id, gauges):
                self.gauges = gauges
                self._engaged.pop(id, None)
                self._tell()
            case Refused(id, error):
                self._engaged.pop(id, None)
                self._tell()
                stream = self._streams.get(id)
                if stream is not None:
                    stream.queue.put_nowait(error)
            case Ready():
                self.ready = message
                if self.speculation is None:
                    self.speculation = message.speculation
                elif self.speculation != message.speculation:
                    self._set(self.speculation)  # what was set outlives a worker
                self._tell()
            case Failed(error):
                self.failure = error
                self._tell()
            case Logged(level, text):
                logger.log(level, "%s", text)
            case Broken(why, traceback):
                logger.error("the engine failed: %s\n%s", why, traceback)

    def _hand_out(self, events: Mapping[str, list[Event]]) -> None:
        """Each request's events to its stream."""
        for id, mine in events.items():
            stream = self._streams.get(id)
            if stream is not None:
                stream.put(mine)
                if not stream.left:
                    self._engaged.pop(id, None)

    def _show(self, step: Stepped, events: Mapping[str, list[Event]]) -> None:
        """Tell the observers of a step; the log has the first failure of each."""
        for observe in self.observers:
            try:
                observe(step, events)
            except Exception:
                if observe not in self._failing:
                    self._failing.append(observe)
                    logger.exception("an observer of the engine failed; more of it is not logged")

    def _died(self, worker: WorkerProcess, code: int | None) -> None:
        """The worker is gone: end its requests, and start another unless that does not help."""
        if worker is not self._worker:
            return
        held = {i: b for i, b in self._engaged.items() if not worker.withdraw(("add", i))}
        ready, hung, bodies = self.ready is not None, self._watch.hung, {*held.values()}
        self.ready, self.gauges, self._worker = None, Gauges(), None
        self._engaged.clear()
        if self._closing or self.failure is not None:
            return
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        how = "hung" if hung else how
        logger.error("the engine %s", how)
        self._end_streams(f"the engine {how} while the request ran")
        self.suspects.died(bodies)
        self._deaths.died(running=bool(bodies), ready=ready)
        often = self._deaths.hopeless
        if often is not None:
            self._fail(
                f"the engine died {often}, the last time it {how}; see the log for the reason."
            )
            return
        self.restarts += 1
        assert self._loop is not None
        self._loop.call_later(self._deaths.pause, self._spawn)

    def _fail(self, why: str) -> None:
        """Give up."""
        self.failure = WorkerError(why)
        self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for the worker's state to change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_streams(self, why: str) -> None:
        """End the streams whose requests are not done; the others have all they need."""
        for stream in self._streams.values():
            if stream.left:
                stream.queue.put_nowait(WorkerError(f"{why}; send it again."))
