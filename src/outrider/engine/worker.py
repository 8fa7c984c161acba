"""The engine in a process of its own: requests come in and steps go out through a pipe.

The front keeps all that is slow away from a step: it tokenises, writes text and serialises. Here
one thread reads the pipe and prepares requests (checks, laws, grammars), and the main thread does
nothing but step.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from ..config import EngineConfig
from ..drafters.base import NoDrafter
from ..drafters.combine import Switch
from ..drafters.ngram import NgramDrafter
from ..drafters.prediction import PredictionDrafter
from ..drafters.registry import DrafterSpec
from ..errors import ConfigError, OutriderError, RequestError
from ..text.template import TextCodec, has_tokenizer
from ..types import Event, Request, SamplingParams, Sequence
from .engine import Engine
from .pace import Gain

WARM_TOKENS = 4
"""Tokens that are decoded before the worker says that it is ready."""
COMPILERS = 2
"""Threads that compile grammars, so that a slow one holds up neither steps nor other requests."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker runs: see ``Engine``."""

    folder: Path
    tokenizer: Path
    drafter: DrafterSpec
    config: EngineConfig


@dataclass(frozen=True)
class SpeculationState:
    """The switch: whether anything is drafted, by whom unless a request says, and how far."""

    enabled: bool
    drafter: str
    num_speculative_tokens: int


class Add(NamedTuple):
    """Start a request."""

    request: Request


class Abort(NamedTuple):
    """Drop a request, whether it is known or not."""

    request_id: str


class Stop(NamedTuple):
    """End the process after the step that runs."""


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


class Gauges(NamedTuple):
    """How full the engine is, and what it has done since its start."""

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


class Stepped(NamedTuple):
    """What a step emitted; ``seconds`` is how long it took."""

    events: list[Event]
    gauges: Gauges
    seconds: float


Command = Add | Abort | Stop | SpeculationState
Message = Ready | Failed | Refused | Stepped | Gauges | SpeculationState


def run_worker(link: Connection, spec: WorkerSpec) -> None:
    """The process: load, warm up, serve until told to stop or the front is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the front decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        codec = TextCodec(spec.tokenizer) if has_tokenizer(spec.tokenizer) else None
        engine = Engine(spec.folder, spec.drafter, spec.config, codec.backend if codec else None)
    except OutriderError as error:
        link.send(Failed(error))
        return
    Worker(engine, link).serve()


@dataclass
class _Inbox:
    """What the reading thread hands to the stepping one."""

    items: deque[Callable[[], None]] = field(default_factory=deque)
    filled: threading.Event = field(default_factory=threading.Event)

    def put(self, item: Callable[[], None]) -> None:
        """Have the stepping thread call ``item`` between two steps."""
        self.items.append(item)
        self.filled.set()

    def drain(self, wait: bool) -> None:
        """Call everything that lies here; with ``wait`` at least one."""
        if wait:
            self.filled.wait()
        self.filled.clear()
        while self.items:
            self.items.popleft()()


class Worker:
    """Steps an engine as long as it has work.

    Args:
        engine: idle.
        link: ``Command`` in, ``Message`` out.
    """

    def __init__(self, engine: Engine, link: Connection) -> None:
        self.engine = engine
        self.link = link
        self.inbox = _Inbox()
        self.gain = Gain()
        self.stopping = False
        self.dropped: set[str] = set()  # aborted while they were prepared
        self.preparing: set[str] = set()
        main, config = engine.drafter, engine.config
        self.longest = length = config.num_speculative_tokens
        self.speculation = SpeculationState(main.max_length > 0, main.name, length)
        drafters = {main.name: main} if main.max_length else {}
        if engine.model.truncates:
            drafters.setdefault("ngram", NgramDrafter(length))
            drafters["prediction"] = PredictionDrafter(length)
        self.switch = Switch({**drafters, "none": NoDrafter()}, main.name)
        if config.acceptance_rule == "coupled":
            engine.drafter = self.switch

    def serve(self) -> None:
        """Decode something, say so, and go on until told to stop."""
        self._warm_up()
        engine = self.engine
        self._send(
            Ready(
                tuple(self.switch.drafters), self.speculation, str(engine.budget),
                engine.budget.tokens, engine.max_model_len, self.longest,
                len(os.sched_getaffinity(0)),
            )
        )  # fmt: skip
        reader = threading.Thread(target=self._read, name="outrider-reader", daemon=True)
        reader.start()
        while not self.stopping:
            self.inbox.drain(wait=not engine.has_work)
            if engine.has_work and not self.stopping:
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
        engine, scheduler = self.engine, self.engine.scheduler
        decoding, usual = scheduler.num_decoding, engine.draft_length
        if usual and decoding and self.gain.due(decoding):
            engine.draft_length = 0
        rows, begin = scheduler.rows, time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - begin
        engine.draft_length = usual
        if decoding and scheduler.rows - rows == decoding:  # no prompt went along
            drafters = {e.drafted.drafter or "model" for e in events if e.drafted is not None}
            if not drafters:
                self.gain.plain(decoding, seconds)
            elif len(drafters) == 1:
                emitted = sum(event.token_id is not None for event in events)
                self.gain.drafted(drafters.pop(), decoding, emitted, seconds)
        self._send(Stepped(events, self._gauges(), seconds))

    def _gauges(self) -> Gauges:
        engine, scheduler = self.engine, self.engine.scheduler
        pool = scheduler.pool
        return Gauges(
            len(scheduler.running), len(scheduler.waiting), pool.num_usable,
            pool.num_usable - pool.num_free, scheduler.preemptions, scheduler.rows,
            scheduler.queried, scheduler.hit,
            engine.draft_seconds, engine.verify_seconds, dict(self.gain.speedups),
        )  # fmt: skip

    def _send(self, message: Message) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reading thread meets it too
            self.link.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _read(self) -> None:
        """Take commands until the front is gone, which ends the process."""
        compilers = ThreadPoolExecutor(COMPILERS, "outrider-grammar")
        while True:
            try:
                command: Command = pickle.loads(self.link.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            match command:
                case Add(request):
                    self.preparing.add(request.id)
                    if request.params.structured_outputs is None:
                        self._prepare(request)
                    else:
                        compilers.submit(self._prepare, request)
                case Abort(id):
                    self.inbox.put(partial(self._abort, id))
                case SpeculationState():
                    self.inbox.put(partial(self._set, command))
                case Stop():
                    self.inbox.put(self._stop)

    def _prepare(self, request: Request) -> None:
        """Outside the stepping thread: make sequences of a request, or say why not."""
        try:
            self._check(request)
            sequences = self.engine.prepare(request)
        except OutriderError as error:
            refusal = Refused(request.id, error)
            self.inbox.put(lambda: self._refuse(refusal))
        except Exception as error:  # what a library makes of a client's grammar ends nobody else
            refusal = Refused(request.id, RequestError(f"the request cannot be prepared: {error}"))
            self.inbox.put(lambda: self._refuse(refusal))
        else:
            self.inbox.put(lambda: self._enqueue(request.id, sequences))

    def _check(self, request: Request) -> None:
        """Refuse what asks for a drafter or a length that there is not.

        Raises:
            ConfigError: it does.
        """
        self.switch.of(request)
        wanted, most = request.speculation.num_speculative_tokens or 0, self.longest
        if wanted > most:
            raise ConfigError(
                f"num_speculative_tokens is {wanted}, but this engine drafts {most} tokens at "
                "most; give that or less."
            )

    def _enqueue(self, id: str, sequences: list[Sequence]) -> None:
        self.preparing.discard(id)
        if id in self.dropped:
            self.dropped.discard(id)
            return
        try:
            self.engine.enqueue(sequences)
        except OutriderError as error:
            self._send(Refused(id, error))

    def _refuse(self, refusal: Refused) -> None:
        self.preparing.discard(refusal.request_id)
        self.dropped.discard(refusal.request_id)
        self._send(refusal)

    def _abort(self, id: str) -> None:
        if id in self.preparing:
            self.dropped.add(id)
        self.engine.abort(id)
        self._send(self._gauges())  # no step may follow that would tell

    def _set(self, state: SpeculationState) -> None:
        """Draft in another way from the next step on, and say what is in force."""
        self.speculation = state
        self.switch.default = state.drafter
        self.engine.draft_length = state.num_speculative_tokens if state.enabled else 0
        self._send(state)

    def _stop(self) -> None:
        self.stopping = True
