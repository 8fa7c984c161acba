"""A real server in a process of its own, for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 60.0


class Served:
    """A running ``outrider serve``."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        words = ["serve", "--port", "0", *map(str, arguments)]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider", *words], stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_SECONDS) or not self.url:
            self.stop(signal.SIGKILL)
            raise AssertionError("\n".join(self.lines))

    url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.search(r"listening on (\S+)", line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def worker(self) -> int:
        """The process id of its engine."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        for child in Path(path).read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("no engine")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def served(*arguments: str | Path, **environment: str) -> Iterator[Served]:
    """A server as long as the context lasts."""
    server = Served(*arguments, **environment)
    try:
        yield server
    finally:
        server.stop(signal.SIGKILL)
