"""Programs and servers forked from the process of ``preloaded``: without 6 s of imports."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
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


def run_program(
    command: Sequence[str],
    timeout: float | None = None,
    env: Mapping[str, str] = os.environ,
    cwd: Path | str = ".",
    **_: object,
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` returns of a Python program, with its texts.

    Args:
        command: an interpreter, its options, and ``-m MODULE``, ``-c CODE`` or a file; arguments.
    """
    with TemporaryDirectory() as folder:
        streams = Path(folder, "out"), Path(folder, "err")
        process = by_fork("spawn").Process(
            target=_be, args=(command[1:], dict(env), str(cwd), *map(str, streams))
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout or 0.0)
        out, err = (stream.read_text(errors="replace") for stream in streams)
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _be(words: list[str], environment: dict[str, str], cwd: str, out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if torch := sys.modules.get("torch"):  # it has read the variable of the process before
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", cores)))
    start = next(i for i, word in enumerate(words) if word in ("-m", "-c") or word[:1] != "-")
    kind, name = words[start], words[min(start + 1, len(words) - 1)]
    try:
        if kind == "-m":
            sys.argv = words[start + 1 :]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *words[start + 2 :]]
            exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = words[start:]
            runpy.run_path(kind, run_name="__main__")
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
            with suppress(ProcessLookupError):  # it may end meanwhile
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
