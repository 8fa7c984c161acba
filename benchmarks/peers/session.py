"""Peers as processes that stay loaded, and what else the machine did while one of them ran."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from outrider.errors import OutriderError
from outrider.native.choice import library, open_library

from .runners.serve import processes

K = TypeVar("K")
READ_BYTES = 1 << 30
"""More than caches keep from one pass to the next."""
READ_PASSES = 5
PEAK_PIECES, PEAK_PASSES = 128, 5
LOAD_SECONDS, RUN_SECONDS, CLOSE_SECONDS = 1200.0, 600.0, 10.0
TICK = os.sysconf("SC_CLK_TCK")
# Settings of this process that would decide over the peer's threads or reach for the network.
DROPPED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "VIRTUAL_ENV")
ADDED = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


class PeerError(OutriderError):
    """A peer cannot do what it was asked, or failed; the message says why."""


@dataclass(frozen=True)
class Answer:
    """One run of a peer; ``ids`` are by prompt, ``peak_memory`` is in bytes, loading included.

    ``first`` and ``seconds`` are T(1) and T(N), s: two calls, of one token a prompt and of all; one
    and the same call where N is 1; None for T(1) where it was left out. ``others`` is how many
    cores other processes used meanwhile.
    """

    ids: list[list[int]]
    first: float | None
    seconds: float
    peak_memory: int
    others: float

    @property
    def behind_first(self) -> float:
        """T(N) - T(1), s."""
        assert self.first is not None
        return self.seconds - self.first


def busy() -> float:
    """Return seconds of processor time that all processes and the hypervisor took since boot."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / TICK


def used(root: int) -> float:
    """Return seconds of processor time that a process and those below it took, the dead too."""
    total = 0
    for process in processes(root):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, stat[11:15]))
    return total / TICK


def available_memory() -> int:
    """Return bytes that new processes can take: the system's estimate."""
    memory = Path("/proc/meminfo").read_text()
    return 1024 * int(memory.partition("MemAvailable:")[2].split()[0])


def read_bandwidth() -> float | None:
    """Return the bytes a second that the native step's threads read; None without the step.

    It is the fastest of ``READ_PASSES`` over memory that is given back, and bounds plain decoding.
    """
    native = library()
    if native is None:
        return None
    memory, seconds = np.ones(READ_BYTES, np.uint8), []
    for _ in range(READ_PASSES):
        begin = time.perf_counter()
        native.read(memory)
        seconds.append(time.perf_counter() - begin)
    return READ_BYTES / min(seconds)


def peak_rate(kind: str, isa: str | None) -> float | None:
    """Return the products a second that the native step's threads can do; None without the step.

    Of one of ``PEAKS``, within an instruction set: the fastest of ``PEAK_PASSES`` in registers.
    """
    native = open_library(isa) if isa else library()
    if native is None:
        return None
    rates = []
    for _ in range(PEAK_PASSES):
        begin = time.perf_counter()
        products = native.multiply(kind, PEAK_PIECES)
        rates.append(products / (time.perf_counter() - begin))
    return max(rates)


class Session:
    """One runner with its models loaded; ``spec`` is the first line of ``runners/serve.py``.

    What it prints goes to the file ``log``; ``environment`` is added to this process's variables.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        spec: dict[str, Any],
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        kept = {key: value for key, value in os.environ.items() if key not in DROPPED}
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w", encoding="utf-8") as out:
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out,
                    env={**kept, **ADDED, **(environment or {})}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise PeerError(f"{command[0]} cannot be run ({error.strerror})") from None
        try:
            self.version = str(self._ask(spec, LOAD_SECONDS)["version"])
        except BaseException:
            self.close()
            raise

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        temperature: float,
        seed: int,
        k: int = 0,
        once: bool = False,
    ) -> Answer:
        """Run prompts together, only for all their tokens if ``once``; see ``runners/serve.py``."""
        request = {
            "prompts": prompts, "max_tokens": max_tokens, "temperature": temperature, "seed": seed,
            "k": k, "once": once,
        }  # fmt: skip
        wall, everybody = time.perf_counter(), busy()
        own = used(self.process.pid) + time.process_time()
        answer = self._ask(request, RUN_SECONDS)
        wall = time.perf_counter() - wall
        own = used(self.process.pid) + time.process_time() - own
        others = max(0.0, (busy() - everybody - own) / wall)
        return Answer(
            answer["ids"], answer["first"], answer["seconds"], answer["peak_memory"], others
        )

    def _ask(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        """Send a line and wait at most ``limit`` seconds for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        start, late = time.monotonic(), threading.Timer(limit, self._kill)
        late.start()
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        late.cancel()
        if not line:
            reason = f"it ended with code {self.process.wait()}"
            if time.monotonic() - start >= limit:
                reason = f"no answer within {limit:.0f} s"
            raise PeerError(f"{reason}; its log: {self.log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        with self.process:  # closes the pipes and waits
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                self.process.communicate(timeout=CLOSE_SECONDS)  # closes its stdin
            self._kill()


class Pool(Generic[K]):
    """Sessions by key, opened when needed; the oldest are closed when memory is short."""

    def __init__(
        self,
        open_: Callable[[K], Session],
        need: Callable[[K], int],
        available: Callable[[], int] = available_memory,
    ) -> None:
        self.open, self.need, self.available = open_, need, available
        self.sessions: dict[K, Session] = {}

    def get(self, key: K) -> Session:
        if key not in self.sessions:
            while self.sessions and self.available() < self.need(key):
                self.drop(next(iter(self.sessions)))
            self.sessions[key] = self.open(key)
        self.sessions[key] = self.sessions.pop(key)  # the last one used stands last
        return self.sessions[key]

    def drop(self, key: K) -> None:
        if key in self.sessions:
            self.sessions.pop(key).close()

    def close(self) -> None:
        for key in list(self.sessions):
            self.drop(key)
