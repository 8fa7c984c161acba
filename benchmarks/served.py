"""``outrider serve`` in a process of its own, for benchmarks and tests."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.request import urlopen

from outrider.errors import ConfigError

START_SECONDS = 300.0
STOP_SECONDS = 60.0
QUIET = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Served(AbstractContextManager["Served", None]):
    """A running server; as a context it is killed at the end, unless it has ended.

    Args:
        arguments: of the command, behind ``--port 0``.
        environment: variables that it has beside this process's.

    ``module`` is the one that is run.
    """

    module = "outrider"

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self.lines: list[str] = []
        self.url = ""
        words = ["serve", "--port", "0", *map(str, arguments)]
        self.process = self._begin(words, {**os.environ, **environment})
        self._up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._up.wait(START_SECONDS) or not self.url:
            self.stop(signal.SIGKILL)
            raise ConfigError("\n".join(self.lines) or "the server did not come up.")

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)

    def _begin(self, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start the process."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *words],
            stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def _read(self) -> None:
        """Keep what it says, and find its address there."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if address := re.search(r"listening on (\S+)", line):
                self.url = address[1]
                self._up.set()
        self._up.set()

    def engine(self) -> int | None:
        """The process id of its engine, None while there is none."""
        return engine_of(self.process.pid)

    def kill_engine(self) -> bool:
        """End its engine as the kernel does when memory is short; False while there is none."""
        engine = self.engine()
        if engine is not None:
            os.kill(engine, signal.SIGKILL)
        return engine is not None

    def pin_engine(self, cpu: int) -> None:
        """Have every thread of the engine run on one CPU."""
        for thread in Path(f"/proc/{self.engine()}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cpu})

    def memory(self) -> int:
        """Resident bytes of server and engine."""
        total = 0
        for process in (self.process.pid, self.engine()):
            with suppress(OSError, IndexError):
                pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
        return total

    def peak(self) -> int:
        """Resident bytes of server and engine at most, each at its own time."""
        total = 0
        for process in (self.process.pid, self.engine()):
            status = Path(f"/proc/{process}/status").read_text()
            total += 1024 * int(status.partition("VmHWM:")[2].split()[0])
        return total

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code


def engine_of(server: int) -> int | None:
    """The process id of a server's engine, None while there is none."""
    with suppress(OSError):
        for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def metrics(url: str) -> dict[str, float]:
    """Return a server's metrics, summed over their labels."""
    with urlopen(f"{url}/metrics", timeout=STOP_SECONDS) as answer:
        text = answer.read().decode()
    totals: dict[str, float] = defaultdict(float)
    for name, value in re.findall(r"^([a-z0-9_:]+)\S* (\S+)$", text, re.M):
        totals[name] += float(value)
    return totals


async def unrest(url: str, seconds: float) -> str:
    """Wait until no call runs or waits and no cache is held; return a sentence if some still do."""
    deadline = time.monotonic() + seconds
    while True:
        values = metrics(url)
        left = {name: values[f"vllm:{name}"] for name in QUIET if values[f"vllm:{name}"]}
        if not left or time.monotonic() > deadline:
            return f"nobody waits for an answer, and yet: {left}" if left else ""
        await asyncio.sleep(0.1)
