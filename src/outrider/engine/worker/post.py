"""Hands a worker's messages to the event loop, which may start later than the worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from ...errors import OutriderError, WorkerError
from .messages import Facts, Logged, Message
from .process import UNGUARDED, WorkerProcess, unguarded

logger = logging.getLogger("outrider")


class Post:
    """Hands messages and exits of workers to an event loop; they wait until there is one.

    In the loop it calls ``take`` with every message except log lines and the first facts, and
    ``ended`` with a worker's exit code.
    """

    def __init__(
        self,
        take: Callable[[WorkerProcess, Message], object],
        ended: Callable[[WorkerProcess, int | None], object],
    ) -> None:
        self._take, self._ended = take, ended
        self._facts: Future[Facts] = Future()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[Callable[[], object]] = []

    def facts(self) -> Facts:
        """Wait for a checkpoint's facts; OutriderError if it cannot be read or the worker ended."""
        return self._facts.result()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand the waiting calls to the loop, and later ones as they come."""
        with self._lock:
            self._loop = loop
            for call in self._waiting:
                loop.call_soon(call)
            self._waiting.clear()

    def message(self, worker: WorkerProcess, message: Message) -> None:
        """Take a message; any thread may call it."""
        match message:
            case Logged(level, text):
                logger.log(level, "%s", text)
            case Facts() if not self._facts.done():
                self._facts.set_result(message)
            case OutriderError() if not self._facts.done():
                self._facts.set_exception(message)
            case _:
                self._put(partial(self._take, worker, message))

    def end(self, worker: WorkerProcess, code: int | None) -> None:
        """Take the exit of a worker; any thread may call it."""
        if self._facts.done():
            self._put(partial(self._ended, worker, code))
        elif code == UNGUARDED:
            self._facts.set_exception(unguarded())
        else:
            why = f"the engine {end_of(code)} before it had read the checkpoint; see the log."
            self._facts.set_exception(WorkerError(why))

    def _put(self, call: Callable[[], object]) -> None:
        """Have the loop make a call; RuntimeError if it is closed."""
        with self._lock:
            if self._loop is None:
                self._waiting.append(call)
            else:
                self._loop.call_soon_threadsafe(call)


def end_of(code: int | None) -> str:
    """Return how a worker ended, by its exit code."""
    return f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
