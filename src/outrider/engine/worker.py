"""The engine in a process of its own: requests come in and steps go out through a pipe.

The front keeps all that is slow away from a step: it tokenises, writes text and serialises. Here
one thread reads the pipe and prepares requests (checks, laws, grammars), and the main thread does
nothing but step.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn
from weakref import WeakValueDictionary

from ..config import EngineConfig
from ..drafters.base import DrafterSpec
from ..errors import OutriderError, RequestError
from ..text.codec import TextCodec, has_tokenizer
from ..types import Event, Request, SamplingParams, Sequence
from .build import build_engine
from .engine import Engine
from .pulse import Beat, Pulse
from .speculation import SpeculationState
from .stderr import guard
from .trim import trim_regularly

logger = logging.getLogger("outrider")

WARM_TOKENS = 4
"""Tokens that are decoded before the worker says that it is ready."""
COMPILERS = 2
"""Threads that compile grammars, so that a slow one holds up neither steps nor other requests."""
MOST_TOLD = 300
"""Characters of an unforeseen error that its sentence tells."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker runs: see ``Engine``."""

    folder: Path
    tokenizer: Path
    drafter: DrafterSpec
    config: EngineConfig


class Add(NamedTuple):
    """Start a request."""

    request: Request


class Abort(NamedTuple):
    """Drop a request, whether it is known or not."""

    request_id: str


class Ready(NamedTuple):
    """The engine is loaded and has decoded."""

    drafters: tuple[str, ...]
    speculation: SpeculationState
    budget: str
    num_tokens: int
    max_model_len: int
    max_draft: int
    threads: int


class Failed(NamedTuple):
    """The engine cannot be loaded."""

    error: OutriderError


class Refused(NamedTuple):
    """A request cannot be served."""

    request_id: str
    error: OutriderError


class Broken(NamedTuple):
    """The engine failed in a way that nobody foresaw, and the process ends."""

    why: str
    traceback: str


class Logged(NamedTuple):
    """A line for the front's log."""

    level: int
    text: str


class Gauges(NamedTuple):
    """How full the engine is, and what it has done since its start.

    ``generation`` is the number of the process: its counts begin at 0.
    """

    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_used: int = 0
    preemptions: int = 0
    rows: int = 0
    queried: int = 0
    hit: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    speedups: Mapping[str, float] = {}
    generation: int = 0


class Aborted(NamedTuple):
    """A request that the front dropped is gone."""

    request_id: str
    gauges: Gauges


class Stepped(NamedTuple):
    """What a step emitted; ``seconds`` is how long it took."""

    events: list[Event]
    gauges: Gauges
    seconds: float


Command = Add | Abort | SpeculationState
Message = Ready | Failed | Refused | Stepped | Aborted | Beat | Broken | Logged


class Outlet:
    """The way to the front, for every thread. A front that does not read holds the senders up."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; without a front, end the process."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._lock:
                self._link.send_bytes(data)
        except OSError:
            os._exit(0)


class _Forward(logging.Handler):
    """Sends what is logged here to the front, whose handlers know the log's form."""

    def __init__(self, outlet: Outlet) -> None:
        super().__init__(logging.WARNING)
        self._outlet = outlet

    def emit(self, record: logging.LogRecord) -> None:
        """Send one line."""
        self._outlet.send(Logged(record.levelno, self.format(record)))


def run_worker(link: Connection, spec: WorkerSpec, generation: int) -> None:
    """The process: load, warm up, serve until the front is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the front decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    guard()
    trim_regularly()
    outlet = Outlet(link)
    logger.addHandler(_Forward(outlet))
    logger.propagate = False
    pulse = Pulse(outlet.send)
    try:
        engine = _load(spec, outlet)
        Worker(engine, link, outlet, pulse, generation).serve()
    except BaseException as error:
        _break(outlet, error)


def _load(spec: WorkerSpec, outlet: Outlet) -> Engine:
    """The engine; one that cannot be loaded ends the process."""
    try:
        codec = TextCodec(spec.tokenizer) if has_tokenizer(spec.tokenizer) else None
        backend = codec.backend if codec else None
        return build_engine(spec.folder, spec.drafter, spec.config, backend)
    except OutriderError as error:
        outlet.send(Failed(error))
        os._exit(0)


def _break(outlet: Outlet, error: BaseException) -> NoReturn:
    """Tell the front why, and end the process."""
    why = f"{type(error).__name__}: {error}"[:MOST_TOLD]
    outlet.send(Broken(why, "".join(traceback.format_exception(error))))
    os._exit(1)


@dataclass
class _Inbox:
    """What the reading thread hands to the stepping one."""

    items: deque[Callable[[], None]] = field(default_factory=deque)
    filled: threading.Event = field(default_factory=threading.Event)

    def put(self, item: Callable[[], None]) -> None:
        """Have the stepping thread call ``item`` between two steps."""
        self.items.append(item)
        self.filled.set()

    def drain(self) -> None:
        """Call everything that lies here."""
        self.filled.clear()
        while self.items:
            self.items.popleft()()


class _Adding:
    """A request on its way into the engine; the stepping thread sets the flags."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.dropped = False
        self.done = False


class Worker:
    """Steps an engine as long as it has work.

    Args:
        engine: idle.
        link: brings commands.
        outlet: takes messages.
        pulse: is told what the threads do.
        generation: the number of this process.
    """

    def __init__(
        self, engine: Engine, link: Connection, outlet: Outlet, pulse: Pulse, generation: int
    ) -> None:
        self.engine = engine
        self.link = link
        self.outlet = outlet
        self.pulse = pulse
        self.generation = generation
        self.inbox = _Inbox()
        self.preparing: WeakValueDictionary[str, _Adding] = WeakValueDictionary()

    def serve(self) -> None:
        """Decode something, say so, and go on until the front is gone."""
        self._warm_up()
        engine, pulse = self.engine, self.pulse
        speculator, budget = engine.speculator, engine.budget
        self.outlet.send(
            Ready(
                tuple(speculator.drafters), speculator.state, str(budget), budget.tokens,
                engine.max_model_len, speculator.max_length, len(os.sched_getaffinity(0)),
            )
        )  # fmt: skip
        reader = threading.Thread(target=self._read, name="outrider-reader", daemon=True)
        reader.start()
        for number in itertools.count():
            if not engine.has_work:
                pulse.step = None
                self.inbox.filled.wait()
            pulse.step = number
            self.inbox.drain()
            if engine.has_work:
                self._step()

    def _warm_up(self) -> None:
        """Decode a few tokens, so that the first request finds all warm."""
        self.engine.grammars.warm_up()
        params = SamplingParams(temperature=0, max_tokens=WARM_TOKENS, ignore_eos=True)
        shortest = min(self.engine.max_model_len - 1, 8)
        request = Request("warm-up", (0,) * max(1, shortest - WARM_TOKENS), params, 0)
        self.engine.add(request)
        while self.engine.has_work:
            self.engine.step()

    def _step(self) -> None:
        begin = time.perf_counter()
        events = self.engine.step()
        seconds = time.perf_counter() - begin
        self.pulse.longest = max(self.pulse.longest, seconds)
        self.outlet.send(Stepped(events, self._gauges(), seconds))

    def _gauges(self) -> Gauges:
        engine, scheduler = self.engine, self.engine.scheduler
        pool, costs = scheduler.pool, engine.costs
        return Gauges(
            len(scheduler.running), len(scheduler.waiting), pool.num_usable,
            pool.num_usable - pool.num_free, scheduler.preemptions, scheduler.rows,
            scheduler.queried, scheduler.hit,
            costs.draft_seconds, costs.verify_seconds, dict(costs.speedups),
            self.generation,
        )  # fmt: skip

    def _read(self) -> None:
        """Take commands until the front is gone, which ends the process."""
        try:
            compilers = ThreadPoolExecutor(COMPILERS, "outrider-grammar")
            for number in itertools.count():
                self.pulse.command = None
                data = self.link.recv_bytes()
                self.pulse.command = number
                self._take(pickle.loads(data), compilers)
        except (EOFError, OSError):
            os._exit(0)
        except BaseException as error:
            _break(self.outlet, error)

    def _take(self, command: Command, compilers: ThreadPoolExecutor) -> None:
        """Do what a command asks, or have the stepping thread do it."""
        match command:
            case Add(request):
                adding = self.preparing[request.id] = _Adding(request)
                if request.params.structured_outputs is None:
                    self._prepare(adding)
                else:
                    compilers.submit(self._prepare, adding)
            case Abort(id):
                self.inbox.put(partial(self._abort, id, self.preparing.get(id)))
            case SpeculationState():
                self.inbox.put(partial(self.engine.speculator.set, command))

    def _prepare(self, adding: _Adding) -> None:
        """Outside the stepping thread: make sequences of a request, or say why not."""
        request = adding.request
        try:
            sequences = self.engine.prepare(request)
        except OutriderError as error:
            self.inbox.put(partial(self._refuse, adding, error))
        except BaseException as error:  # a library's panic over one request ends nobody else
            why = f"the request cannot be prepared: {error}"[:MOST_TOLD]
            self.inbox.put(partial(self._refuse, adding, RequestError(why)))
        else:
            self.inbox.put(partial(self._enqueue, adding, sequences))

    def _enqueue(self, adding: _Adding, sequences: list[Sequence]) -> None:
        adding.done = True
        if adding.dropped:
            self.outlet.send(Aborted(adding.request.id, self._gauges()))
            return
        try:
            self.engine.enqueue(sequences)
        except OutriderError as error:
            self.outlet.send(Refused(adding.request.id, error))

    def _refuse(self, adding: _Adding, error: OutriderError) -> None:
        adding.done = True
        self.outlet.send(Refused(adding.request.id, error))

    def _abort(self, id: str, adding: _Adding | None) -> None:
        """Drop a request; one that is being prepared goes when that is done."""
        if adding is not None and not adding.done:
            adding.dropped = True
            return
        self.engine.abort(id)
        self.outlet.send(Aborted(id, self._gauges()))
