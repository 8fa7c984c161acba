"""The worker as the frontend sees it: a process, and a thread for each direction of its pipe."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import WorkerError

if TYPE_CHECKING:
    from .messages import Command, Message, WorkerSpec

logger = logging.getLogger("outrider")

NAME = "outrider-engine"
UNGUARDED = 79
"""Exit code of a worker whose main module tries to start another worker when it is imported."""
END_SECONDS = 5.0  # a process whose pipe is closed ends by itself within that time


class Outbox:
    """Unsent commands to the worker, one for each key; putting one in never blocks.

    A newer command replaces the unsent one of its key, which bounds the size of the box.
    """

    def __init__(self) -> None:
        self._commands: dict[object, bytes] = {}
        self._closed = False
        self._changed = threading.Condition()

    def put(self, data: bytes, key: object) -> None:
        """Add a command."""
        with self._changed:
            self._commands[key] = data
            self._changed.notify()

    def withdraw(self, key: object) -> bool:
        """Drop an unsent command; False where there is none."""
        with self._changed:
            return self._commands.pop(key, None) is not None

    def get(self) -> bytes | None:
        """Wait for the next command and return it; None when the box is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closed)
            return None if self._closed else self._commands.pop(next(iter(self._commands)))

    def close(self) -> None:
        """End the thread that gets commands."""
        with self._changed:
            self._closed = True
            self._changed.notify()


def refuse_unguarded() -> None:
    """Refuse to start a worker while a spawned process imports the program's main module.

    If that process is a worker, it exits with ``UNGUARDED`` and its frontend reports the error; in
    any other spawned process a WorkerError is raised.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # multiprocessing's own test
        if process.name == NAME:
            os._exit(UNGUARDED)
        raise unguarded()


def unguarded() -> WorkerError:
    """Return the error for a program that starts an engine when it is imported."""
    program = getattr(sys.modules["__main__"], "__file__", None) or "the program"
    return WorkerError(
        f"the engine's own process imports {program}, which starts an engine again when it is "
        'imported; put the code that it runs under: if __name__ == "__main__":'
    )


def run(link: Connection) -> None:
    """Run a worker in this new process, after its imports and once it knows what to load."""
    from .worker import run_worker

    try:
        spec, generation = pickle.loads(link.recv_bytes())
    except (EOFError, OSError):  # the frontend did not need it
        return
    run_worker(link, spec, generation)


def begin() -> tuple[SpawnProcess, Connection]:
    """Start a worker, which imports its modules; return it and this end of its pipe."""
    context = multiprocessing.get_context("spawn")
    link, its = context.Pipe()
    process = context.Process(target=run, args=(its,), name=NAME, daemon=True)
    try:
        with uninterrupted():
            process.start()
    except BaseException:
        link.close()
        raise
    finally:
        its.close()
    return process, link


_early: list[tuple[SpawnProcess, Connection]] = []
"""A worker that was started before it is known what it will load."""


@contextmanager
def early_worker() -> Iterator[None]:
    """Start a worker for the first ``WorkerProcess`` inside, so that both processes import at once.

    It is killed if nothing uses it. If it cannot start, that ``WorkerProcess`` reports why.
    """
    main = sys.modules["__main__"]
    if Path(getattr(main, "__file__", None) or "").name == "outrider":
        main.__file__ = None  # the command's script, which a worker need not import
    with suppress(OSError):
        _early.append(begin())
    try:
        yield
    finally:
        while _early:
            process, link = _early.pop()
            link.close()
            process.kill()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl+C; processes started inside block it for good, since the frontend ends them."""
    resource_tracker.ensure_running()  # its start would let signals through again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the new process inherits it
    late: list[int] = []
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    raises = raises and threading.current_thread() is threading.main_thread()
    if raises:
        signal.signal(signal.SIGINT, lambda number, _: late.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if late:
            signal.raise_signal(signal.SIGINT)


class WorkerProcess:
    """One worker process, after ``generation`` earlier ones. No method blocks.

    A thread calls ``take`` with every message, and ``ended`` with the exit code when the process
    has ended. Raises OSError if the system is out of processes, threads, files or memory.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        generation: int,
        take: Callable[[WorkerProcess, Message], object],
        ended: Callable[[WorkerProcess, int | None], object],
    ) -> None:
        refuse_unguarded()
        self._take, self._ended, self._outbox = take, ended, Outbox()
        self.withdraw = self._outbox.withdraw
        told = pickle.dumps((spec, generation), pickle.HIGHEST_PROTOCOL)
        self._process, self._link = _early.pop() if _early else begin()
        self.kill = self._process.kill  # works at once, even on a stopped process
        with suppress(OSError):  # it is dead already, and the reading thread will notice
            self._link.send_bytes(told)
        self._writer = threading.Thread(target=self._write, name="outrider-commands", daemon=True)
        reader = threading.Thread(target=self._read, name="outrider-events", daemon=True)
        try:
            self._writer.start()
            reader.start()
        except RuntimeError as error:
            self.kill()
            self._outbox.close()
            self._link.close()
            raise OSError(f"no thread can be started ({error})") from error
        # At exit multiprocessing sends SIGTERM, which the worker ignores, and waits for it.
        atexit.register(self.kill)

    def send(self, command: Command, key: object) -> None:
        """Queue a command for the writing thread; see ``Outbox`` for the key."""
        self._outbox.put(pickle.dumps(command, pickle.HIGHEST_PROTOCOL), key)

    def _write(self) -> None:
        """Send commands; a stopped worker blocks this thread and nothing else."""
        try:
            while (data := self._outbox.get()) is not None:
                self._link.send_bytes(data)
        except OSError:  # the worker is dead, and the reading thread will notice
            return

    def _read(self) -> None:
        """Deliver every message, then the exit code."""
        try:
            while True:
                self._take(self, pickle.loads(self._link.recv_bytes()))
        except (EOFError, OSError):  # the worker closed its end
            self._process.join(END_SECONDS)
        except RuntimeError:  # the event loop is closed
            logger.debug("the frontend is gone")
        except Exception:
            logger.exception("a message of the engine cannot be read; the engine is killed")
        self._process.kill()
        self._process.join()
        self._outbox.close()
        self._writer.join()
        self._link.close()
        atexit.unregister(self.kill)
        try:
            self._ended(self, self._process.exitcode)
        except RuntimeError:  # the event loop is closed
            return
