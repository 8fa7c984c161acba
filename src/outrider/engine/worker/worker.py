"""The loop of the engine's process: commands come in and steps go out through a pipe.

The frontend tokenises, detokenises and serialises. Here one thread reads the pipe and prepares
requests (logits pipelines, grammars), and the main thread only steps the engine.
"""

import gc
import itertools
import logging
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn
from weakref import WeakValueDictionary

from tqdm import tqdm

from ...base.freed_memory import trim_regularly
from ...base.stderr import guard
from ...base.types import Request, SequenceState
from ...errors import OutriderError, RequestError
from ..build import build_engine
from ..control.summary import summary
from ..control.switch import SpeculationState
from ..drafting import MAX_REASON
from ..engine import Engine
from ..setup import set_up
from ..successor import Opened, successor, warm_up
from .heartbeat import Pulse
from .messages import (
    Abort,
    Beliefs,
    Command,
    Gauges,
    Left,
    Load,
    Loaded,
    Logged,
    Message,
    Ready,
    Stepped,
    WorkerSpec,
)  # fmt: skip
from .opener import Opener, as_refusal
from .spare_time import SpareTime

logger = logging.getLogger("outrider")

COMPILERS = 2
"""Threads that compile grammars, so that a slow one holds up neither steps nor other requests."""
TOLD_SECONDS = 1.0
"""Least seconds between two messages of the controller's beliefs while the engine has work."""


class Outlet:
    """Sends messages to the frontend, from any thread; blocks while the frontend does not read."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; end the process when the frontend is gone."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._lock:
                self._link.send_bytes(data)
        except OSError:
            os._exit(0)


class _Forward(logging.Handler):
    """Sends log records to the frontend, whose handlers format them."""

    def __init__(self, outlet: Outlet) -> None:
        super().__init__(logging.WARNING)
        self._outlet = outlet

    def emit(self, record: logging.LogRecord) -> None:
        self._outlet.send(Logged(record.levelno, self.format(record)))


def run_worker(link: Connection, spec: WorkerSpec, generation: int) -> None:
    """Read the checkpoint, load the engine, warm it up and serve until the frontend is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C; the frontend decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    guard()
    trim_regularly()
    # tqdm's default lock is a named semaphore, which a killed process leaves behind.
    tqdm.set_lock(threading.RLock())
    outlet = Outlet(link)
    logger.addHandler(_Forward(outlet))
    logger.propagate = False
    pulse = Pulse(outlet.send)
    try:
        try:
            setup = set_up(spec.model, spec.drafter, spec.options, spec.loaded)
            outlet.send(setup.facts)
            engine, opener = build_engine(setup), Opener(spec, setup)
            del setup
        except OutriderError as error:
            outlet.send(error)
            os._exit(0)
        Worker(engine, link, outlet, pulse, generation, opener).serve()
    except BaseException as error:
        _break(outlet, error)


def _break(outlet: Outlet, error: BaseException) -> NoReturn:
    """Report why, and end the process."""
    why = f"{type(error).__name__}: {error}"[:MAX_REASON]
    trace = "".join(traceback.format_exception(error))
    outlet.send(Logged(logging.ERROR, f"the engine failed: {why}\n{trace}"))
    os._exit(1)


@dataclass(eq=False)
class _Adding:
    """A request on its way into the engine; the stepping thread sets the flags."""

    request: Request
    dropped: bool = False
    done: bool = False


class Worker:
    """Steps an engine as long as it has work; ``generation`` is the number of this process.

    Without an ``opener`` no drafter can be loaded.
    """

    def __init__(
        self,
        engine: Engine,
        link: Connection,
        outlet: Outlet,
        pulse: Pulse,
        generation: int,
        opener: Opener | None = None,
    ) -> None:
        self.engine, self.link, self.outlet, self.pulse = engine, link, outlet, pulse
        self.generation, self.opener, self.spare = generation, opener, SpareTime(engine)
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for the stepping thread
        self.preparing: WeakValueDictionary[str, _Adding] = WeakValueDictionary()
        self._told = 0.0  # when beliefs were sent last, and at which step of the controller
        self._told_step = -1

    def serve(self) -> None:
        """Decode a few tokens, send ``Ready``, and step until the frontend is gone."""
        warm_up(self.engine)
        pulse = self.pulse
        self._tell()
        self.outlet.send(self._ready())
        threading.Thread(target=self._read, name="outrider-reader", daemon=True).start()
        for number in itertools.count():
            waits = not self.engine.has_work
            pulse.step = None if waits else number
            while waits or not self.inbox.empty():
                call = self.spare.wait(self.inbox) if waits else self.inbox.get()
                pulse.step, waits = number, False
                call()
            if self.engine.has_work:
                self._step()
            self._tell()

    def _ready(self) -> Ready:
        menu, budget = self.engine.menu, self.engine.budget
        folders = {} if self.opener is None else self.opener.folders
        return Ready(
            tuple(menu.drafters), menu.names, menu.state, str(budget),
            budget.tokens, self.engine.max_model_len, menu.max_depth, folders,
        )  # fmt: skip

    def _step(self) -> None:
        begin = time.perf_counter()
        events = self.engine.step()
        took = time.perf_counter() - begin
        self.outlet.send(Stepped(events, self._gauges()))
        begin = time.perf_counter()
        self.engine.settle()
        self.pulse.longest = max(self.pulse.longest, took + time.perf_counter() - begin)

    def _tell(self) -> None:
        """Send the controller's beliefs: once a second, and when the engine becomes idle."""
        controller, now = self.engine.controller, time.monotonic()
        if controller is None:
            return
        due = now - self._told >= TOLD_SECONDS or not self.engine.has_work
        if due and controller.step != self._told_step:
            self._told, self._told_step = now, controller.step
            self.outlet.send(Beliefs(summary(controller)))

    def _gauges(self) -> Gauges:
        engine, scheduler = self.engine, self.engine.scheduler
        pool, costs = scheduler.pool, engine.chooser.costs
        return Gauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages=pool.num_usable,
            pages_used=pool.num_usable - pool.num_free,
            rows=scheduler.rows,
            counts={
                "preemptions": scheduler.preemptions,
                "queries": scheduler.queried,
                "hits": scheduler.hit,
                "drafting": costs.draft_seconds,
                "verifying": costs.verify_seconds,
            },
            speedups=dict(costs.speedups),
            generation=self.generation,
        )

    def _read(self) -> None:
        """Take commands until the frontend is gone, which ends the process."""
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
        """Carry out a command here or in the stepping thread."""
        match command:
            case Request():
                adding = self.preparing[command.id] = _Adding(command)
                if command.params.structured_outputs is None:
                    self._prepare(adding)
                else:
                    compilers.submit(self._prepare, adding)
            case Abort(id):
                self.inbox.put(partial(self._abort, id, self.preparing.get(id)))
            case SpeculationState():
                self.inbox.put(lambda: self.engine.menu.set(command))
            case Load(drafter):
                threading.Thread(
                    target=self._open, args=(drafter,), name="outrider-opener", daemon=True
                ).start()

    def _open(self, drafter: Path) -> None:
        """Open a drafter while steps go on, then pass it to the stepping thread."""
        assert self.opener is not None
        opened = self.opener.open(drafter, self.engine)
        self.inbox.put(partial(self._load, drafter, opened))

    def _load(self, drafter: Path, opened: Opened | OutriderError) -> None:
        """Replace the engine by one with the opened drafter; if that fails, keep the old one."""
        if isinstance(opened, OutriderError):
            self.outlet.send(Loaded(drafter, opened))
            return
        try:
            self.engine = successor(self.engine, opened)
        except Exception as error:
            self.outlet.send(Loaded(drafter, as_refusal(error)))
        else:
            assert self.opener is not None
            self.opener.folders = opened.setup.folders
            self.spare, self._told_step = SpareTime(self.engine), -1
            self.outlet.send(Loaded(drafter, self._ready()))
        gc.collect()  # engines have reference cycles: the old one would keep its cache

    def _prepare(self, adding: _Adding) -> None:
        """Make sequences of a request, or refuse it; runs outside the stepping thread."""
        made: list[SequenceState] | OutriderError
        try:
            made = self.engine.prepare(adding.request)
        except OutriderError as error:
            made = error.with_traceback(None)  # this frame and the error would hold each other
        except BaseException as error:  # a library's panic over one request must not end the others
            made = RequestError(f"the request cannot be prepared: {error}"[:MAX_REASON])
        self.inbox.put(partial(self._enqueue, adding, made))

    def _enqueue(self, adding: _Adding, made: list[SequenceState] | OutriderError) -> None:
        adding.done = True
        error = made if isinstance(made, OutriderError) else None
        try:
            if not adding.dropped and not isinstance(made, OutriderError):
                return self.engine.enqueue(made)
        except OutriderError as problem:
            error = problem.with_traceback(None)
        self.outlet.send(Left(adding.request.id, self._gauges(), error))

    def _abort(self, id: str, adding: _Adding | None) -> None:
        """Drop a request; one that is being prepared is dropped afterwards."""
        if adding is not None and not adding.done:
            adding.dropped = True
            return
        self.engine.abort(id)
        self.outlet.send(Left(id, self._gauges()))
