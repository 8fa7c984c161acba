"""The interface for asyncio: ``AsyncLLM``, after vLLM's, over an engine in its own process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .base.config import POCKET, EngineConfig, EngineOptions
from .base.types import Event, Folder, SamplingParams, Speculation, grouped_by
from .base.vllm_names import of_engine_args
from .engine.control.switch import SpeculationState, check_choice
from .engine.worker import messages
from .engine.worker.given import given
from .engine.worker.heartbeat import Watch
from .engine.worker.loads import Drafting, Loads
from .engine.worker.post import Post, end_of
from .engine.worker.process import UNGUARDED, WorkerProcess, unguarded
from .engine.worker.restarts import Deaths
from .engine.worker.suspects import Suspects, fingerprint
from .errors import GenerationError, OutriderError, RequestError, WorkerError
from .frontend.inputs import InputProcessor, Prompt
from .frontend.outputs import RequestOutput, RequestState

if TYPE_CHECKING:
    from .drafters.base import DrafterSpec

logger = logging.getLogger("outrider")

TICK_SECONDS = 1.0

Observer = Callable[[messages.Stepped, Mapping[str, Sequence[Event]]], None]
"""Called with every step and its events by request."""


@dataclass
class _Queue:
    """The events of a request under way, a list for each step, until its samples have ended."""

    running: int
    items: asyncio.Queue[list[Event] | OutriderError] = field(default_factory=asyncio.Queue)


class AsyncLLM:
    """A model behind a worker process; for one event loop.

    The worker starts at once and reads the checkpoint, so that this process needs neither torch nor
    transformers. ``start`` waits until it has loaded the weights.

    A worker that dies or hangs takes its requests with it (``WorkerError``) and is started again,
    until it has died three times in a minute without a request, or before it was ready. A request
    that ran alone at two deaths is refused. A drafter of ``load_drafter`` outlives a worker, unless
    that dies in its first minute with it. The worker's process imports the program's main module: a
    script starts the engine under ``if __name__ == "__main__":``.

    Arguments and errors are those of ``LLM``; ``start`` raises errors that only the engine meets.
    """

    def __init__(
        self,
        model: Folder = POCKET,
        drafter: Folder | DrafterSpec | None = "auto",
        **options: Unpack[EngineOptions],
    ) -> None:
        wanted = given(drafter, options)
        EngineConfig(**wanted.engine)  # refuses wrong options before a worker starts
        self.spec = messages.WorkerSpec(model, wanted.drafter, wanted.options)
        self.ready: messages.Ready | None = None
        self.gauges = messages.Gauges()
        self.beliefs: dict[str, Any] | None = None
        """The beliefs of the engine's controller, see ``control/summary.py``; None without one."""
        self.speculation: SpeculationState | None = None
        self.restarts = 0
        self.failure: OutriderError | None = None
        self.observers: list[Observer] = []
        self._failing: list[Observer] = []
        self._queues: dict[str, _Queue] = {}
        self.suspects = Suspects()
        self._engaged: dict[str, str] = {}  # by id the body of each request the worker may hold
        self._deaths = Deaths()
        self._unstarted: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: WorkerProcess | None = None
        self._watch = Watch()
        self.loads = Loads()
        self._changed = asyncio.Event()
        self._closing = False
        self._post = Post(self._take, self._died)
        try:
            self._worker = self._new_worker()
            self.inputs = InputProcessor(self._post.facts())
        except OSError as error:
            raise WorkerError(f"the engine cannot be started ({error}).") from None
        except BaseException:  # including KeyboardInterrupt
            self.shutdown()
            raise
        self.config = self.inputs.config

    @classmethod
    def from_engine_args(cls, engine_args: Any = None, **options: Any) -> AsyncLLM:
        """Return an ``AsyncLLM`` from vLLM's ``AsyncEngineArgs``, or an object or mapping like it.

        Unknown attributes of an object are left out; unknown keys of a mapping are errors.
        """
        args = engine_args or {}
        return cls(**{**(args if isinstance(args, dict) else of_engine_args(args)), **options})

    def launch(self) -> None:
        """Watch the worker, without waiting for it."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._post.begin(self._loop)
            self._loop.call_later(TICK_SECONDS, self._tick)

    async def start(self) -> messages.Ready:
        """Wait until the worker has loaded the model and decoded a token.

        Raises OutriderError: it cannot be loaded, died too often, or was shut down.
        """
        self.launch()
        while self.ready is None or self._closing:
            if self.failure is not None:
                raise self.failure
            if self._closing:
                raise WorkerError("the engine was shut down; make another.")
            await self._changed.wait()
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
        """Continue a prompt, and yield the output so far after every step of the engine.

        Leaving the iterator aborts the request.

        Args:
            prompt: a text, token ids, or ``{"prompt_token_ids": ids}``.
            sampling_params, speculation: None takes the defaults.
            request_id: unique among those under way; made up unless given.
            priority: the lowest go first; 0 unless ``scheduling_policy="priority"``.

        Raises RequestError, ConfigError: the request cannot be served. WorkerError: the engine died
        under it. GenerationError: the request failed on the way; the error holds its output.
        """
        state = self.inputs.request(
            prompt, sampling_params or self.inputs.default_params, request_id,
            speculation=speculation, priority=priority,
        )  # fmt: skip
        async with aclosing(self.run(state)) as steps:
            async for _ in steps:
                if state.error is not None:
                    raise GenerationError(f"the request failed: {state.error}", [state.output()])
                yield state.output()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        speculation: Speculation | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Event, None]:
        """Continue a prompt as ``generate`` does, and yield one ``Event`` for each token.

        ``error`` of an event says why the request failed.
        """
        state = self.inputs.request(
            prompt, sampling_params or self.inputs.default_params, request_id,
            speculation=speculation, priority=priority,
        )  # fmt: skip
        async with aclosing(self.run(state)) as steps:
            async for events in steps:
                for event in events:
                    yield event

    async def run(
        self, state: RequestState, body: str | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """Run a request of ``inputs.request``; yield each step's events once ``state`` has them.

        Leaving the iterator aborts the request. ``body`` is the fingerprint of the call that it
        belongs to, its own unless given. Raises the errors of ``generate``, but no GenerationError.
        """
        request = state.request
        await self._free(request.id)
        body = body or fingerprint([request])
        self.suspects.check(body)
        queue = self._queues[request.id] = _Queue(request.params.n)
        try:
            if self._worker is not None:  # the death of one is reported later
                self._worker.send(request, ("add", request.id))
                self._engaged[request.id] = body
            while queue.running or not queue.items.empty():
                events = await queue.items.get()
                if isinstance(events, OutriderError):
                    queue.running = 0
                    raise events
                if any(event.prompt_logprobs is not None for event in events):
                    yield await asyncio.to_thread(lambda new: [*map(state.take, new)], events)
                else:
                    yield [state.take(event) for event in events]
                if state.broken:
                    return
            if body in self.suspects and body not in self._engaged.values():
                self.suspects.completed(body)
        finally:
            del self._queues[request.id]
            if queue.running:
                self._abort(request.id)

    async def _free(self, id: str) -> None:
        """Wait until the engine runs, and until an earlier request of this id has left it."""
        while True:
            await self.start()
            if id in self._queues:
                raise RequestError(f"request id {id!r} is in use; give another.")
            if id not in self._engaged:
                return
            await self._changed.wait()

    async def set_speculation(self, state: SpeculationState) -> None:
        """Set the default drafter and draft length (None: the engine's) from the next step on.

        Raises ConfigError: there is no such drafter, or the length is out of range.
        """
        while self.loads.under_way:  # the drafter has another name afterwards
            await self.loads.end()
        ready = await self.start()
        check_choice(state, ready.names, ready.max_draft)
        self.speculation = state
        self._send_speculation()

    async def load_drafter(self, drafter: Folder) -> None:
        """Draft with another checkpoint, a folder or file, while requests go on.

        Under ``auto`` it takes the place of the checkpoint there. What requests had in the cache is
        computed again; their output stays the same.

        Raises ConfigError, ModelError, MemoryBudgetError: it cannot be used, and the one before
        goes on; or another one is being loaded. WorkerError: the engine died meanwhile.
        """
        await self.start()
        assert self._worker is not None
        self.loads.begin()
        self._worker.send(messages.Load(Path(drafter).absolute()), "load")
        error = await self.loads.end()
        if error is not None:
            raise error

    @property
    def live(self) -> int:
        """The number of requests under way."""
        return len(self._queues)

    @property
    def trouble(self) -> OutriderError | None:
        """The reason why the engine cannot serve; None while it can, or is being loaded."""
        if self.failure is not None:
            return self.failure
        if self._unstarted is not None:
            return WorkerError(f"{self._unstarted}; it is tried again.")
        why = None if self._worker is None else self._watch.complaint
        return None if why is None else WorkerError(f"{why}; it is restarted if that goes on.")

    def shutdown(self) -> None:
        """Kill the worker at once; running requests fail."""
        self._closing = True
        if self._worker is not None:
            self._worker.kill()
        self._end_streams("the engine was shut down")
        self.loads.ended(WorkerError("the engine was shut down."))
        self._notify()

    def _new_worker(self) -> WorkerProcess:
        return WorkerProcess(self.spec, self.restarts, self._post.message, self._post.end)

    def _spawn(self) -> None:
        """Start a worker; again later where the system cannot do it now."""
        assert self._loop is not None
        if self._closing:
            return
        try:
            self._worker = self._new_worker()
        except OSError as error:
            self._unstarted = f"the engine cannot be started ({error})"
            logger.error("%s; it is tried again", self._unstarted)
            self._deaths.failed_starts += 1
            self._loop.call_later(self._deaths.pause, self._spawn)
        except WorkerError as error:
            self._fail(error)
        except Exception as error:
            self._fail(WorkerError(f"the engine cannot be started: {error}"))
            raise
        else:
            self._unstarted = None
            self._deaths.failed_starts = 0
            self._watch.begin()

    def _tick(self) -> None:
        """Kill a worker that hangs; runs every second."""
        if self._closing or self.failure is not None or self._loop is None:
            return
        self._loop.call_later(TICK_SECONDS, self._tick)
        if self._worker is None:
            return
        self._watch.tick()
        if self._watch.hung:
            logger.error("%s; it is killed and started again", self._watch.complaint)
            self._worker.kill()

    def _abort(self, id: str) -> None:
        """Send the worker an abort, unless the request was never sent."""
        if self._worker is None or self._worker.withdraw(("add", id)):
            self._engaged.pop(id, None)
        else:
            self._worker.send(messages.Abort(id), ("abort", id))

    def _send_speculation(self) -> None:
        if self._worker is not None and self.speculation is not None:
            self._worker.send(self.speculation, "speculation")

    def _take(self, worker: WorkerProcess, message: messages.Message) -> None:
        """Act on a message of the worker."""
        if worker is not self._worker:
            return
        match message:
            case messages.Stepped(events, gauges):
                self.gauges = gauges
                grouped = grouped_by(events, lambda event: event.request_id)
                for id in grouped.keys() & self._queues.keys():
                    queue = self._queues[id]
                    queue.items.put_nowait(grouped[id])
                    queue.running -= sum(e.finish_reason is not None for e in grouped[id])
                    if not queue.running:
                        self._engaged.pop(id, None)
                self._observe(message, grouped)
            case messages.Beliefs(summary):
                self.beliefs = summary
            case messages.Beat():
                self._watch.hear(message)
            case messages.Left(id, gauges, error):
                self.gauges = gauges
                self._engaged.pop(id, None)
                self._notify()
                if error is not None and id in self._queues:
                    self._queues[id].items.put_nowait(error)
            case messages.Ready():
                self.ready = message
                if self.speculation is None:
                    self.speculation = message.speculation
                elif self.speculation != message.speculation:
                    self._send_speculation()  # the setting outlives a worker
                self.loads.started()
                self._notify()
            case messages.Loaded(drafter, messages.Ready() as ready):
                self.loads.replaced(Drafting(self.spec, self.speculation))
                self.spec = replace(self.spec, loaded=drafter)
                self.ready, self.speculation, self.beliefs = ready, ready.speculation, None
                self.loads.ended(None)
            case messages.Loaded(_, OutriderError() as error):
                self.loads.ended(error)
            case OutriderError():
                if not self._go_back(str(message), ready=False):
                    self._fail(message)

    def _observe(self, step: messages.Stepped, events: Mapping[str, list[Event]]) -> None:
        """Call the observers with a step; log the first failure of each."""
        for observe in self.observers:
            try:
                observe(step, events)
            except Exception:
                if observe not in self._failing:
                    self._failing.append(observe)
                    logger.exception("an observer of the engine failed; more of it is not logged")

    def _died(self, worker: WorkerProcess, code: int | None) -> None:
        """End the requests of a worker that is gone, and start another unless that is hopeless."""
        if worker is not self._worker:
            return
        bodies = {b for i, b in self._engaged.items() if not worker.withdraw(("add", i))}
        ready, hung = self.ready is not None, self._watch.hung
        self.ready, self.gauges, self.beliefs, self._worker = None, messages.Gauges(), None, None
        self._engaged.clear()
        if self._closing or self.failure is not None:
            return
        if code == UNGUARDED:
            self._fail(unguarded())
            return
        how = "hung" if hung else end_of(code)
        logger.error("the engine %s", how)
        self._end_streams(f"the engine {how} while the request ran")
        self.suspects.died(bodies)
        self._deaths.died(running=bool(bodies), ready=ready)
        self.loads.ended(WorkerError(f"the engine {how} while the drafter was loaded; try again."))
        self._go_back(f"the engine {how}", ready=ready)
        often = self._deaths.hopeless
        if often is not None:
            why = f"the engine died {often}, the last time it {how}; see the log for the reason."
            self._fail(WorkerError(why))
            return
        self.restarts += 1
        assert self._loop is not None
        self._loop.call_later(self._deaths.pause, self._spawn)

    def _go_back(self, why: str, *, ready: bool) -> bool:
        """Give up the drafter that was loaded last, if it is on trial; return whether it was."""
        before = self.loads.way_back(ready=ready)
        if before is not None:
            logger.error("the drafter in %s is given up: %s", self.spec.loaded, why)
            self.spec, self.speculation = before
        return before is not None

    def _fail(self, why: OutriderError) -> None:
        """Give up for good, with the reason."""
        self.failure = why
        self._notify()

    def _notify(self) -> None:
        """Wake the tasks that wait for a change of the worker."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_streams(self, why: str) -> None:
        """Fail the requests that are not done; the others have all their events."""
        for queue in self._queues.values():
            if queue.running:
                queue.items.put_nowait(WorkerError(f"{why}; send it again."))
