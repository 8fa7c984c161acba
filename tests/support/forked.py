"""``outrider serve`` forked from the process of ``preloaded``: its code, without 6 s of imports."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO, cast

from benchmarks import served

PRELOADED = "tests.support.preloaded"


def by_fork(method: str | None = None) -> Any:
    """``multiprocessing.get_context`` whose spawned processes are forked from the preloaded one."""
    return _context("forkserver" if method == "spawn" else method)


_context = multiprocessing.get_context


def run(
    words: list[str], environment: dict[str, str], said: Connection, engines: Connection
) -> None:
    """Be ``outrider`` with these words; its engines' process ids go to ``engines``."""
    os.dup2(said.fileno(), 2)
    said.close()
    os.environ.clear()
    os.environ.update(environment)
    # Engines come from the process that this one comes from.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    multiprocessing.get_context = by_fork  # type: ignore[assignment]
    launch = popen_forkserver.Popen._launch  # type: ignore[attr-defined]

    def launched(self: Any, process: Any) -> None:
        launch(self, process)
        engines.send(self.pid)

    popen_forkserver.Popen._launch = launched  # type: ignore[attr-defined]
    sys.argv = ["outrider", *words]
    from outrider.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()  # which multiprocessing's processes leave out


class _Process:
    """What ``Served`` needs of a ``subprocess.Popen``."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        said, its = multiprocessing.Pipe(duplex=False)
        self.engines, their = multiprocessing.Pipe(duplex=False)
        self._process = by_fork("spawn").Process(
            target=run, args=(words, environment, its, their), daemon=False
        )
        self._process.start()
        its.close()
        their.close()
        self.pid: int = self._process.pid
        self.stderr: TextIO = os.fdopen(os.dup(said.fileno()), errors="replace")
        said.close()

    @property
    def returncode(self) -> int | None:
        return cast(int | None, self._process.exitcode)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired("outrider serve", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Served(served.Served):
    """``benchmarks.served.Served``, forked; where the start itself is tested, take that one."""

    def _begin(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        self._engine: int | None = None
        return cast("subprocess.Popen[str]", _Process(words, environment))

    def engine(self) -> int | None:
        found = cast(_Process, self.process).engines
        while found.poll():
            try:
                self._engine = found.recv()
            except EOFError:  # the server has ended
                break
        alive = self._engine is not None and Path(f"/proc/{self._engine}").exists()
        return self._engine if alive else None
