"""Peers as processes that stay loaded, and what else the machine did while one of them ran."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...errors import OutriderError
from .runners.serve import processes

K = TypeVar("K")
LOAD_SECONDS, RUN_SECONDS, CLOSE_SECONDS, LOOK_SECONDS = 1200.0, 600.0, 10.0, 2.0
TICK = os.sysconf("SC_CLK_TCK")
# Settings of this process that would decide over the peer's threads or reach for the network.
DROPPED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "VIRTUAL_ENV")
ADDED = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


class PeerError(OutriderError):
    """A peer cannot do what it was asked, or failed; the message says why."""


@dataclass(frozen=True)
class Answer:
    """One run of a peer.

    ``ids`` are by prompt. ``first`` and ``seconds`` are T(1) and T(N), s: two calls, of one token a
    prompt and of all; one and the same call where N is 1. ``others``
    is how many cores other processes used meanwhile, None where the system does not tell.
    ``peak_memory`` is in bytes, loading included.
    """

    ids: list[list[int]]
    first: float
    seconds: float
    peak_memory: int
    others: float | None


def busy() -> float | None:
    """Seconds of processor time that all processes and the hypervisor took since boot."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / TICK


def used(root: int) -> float:
    """Seconds of processor time that a process and those below it took, the dead among them."""
    total = 0
    for process in processes(root):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, stat[11:15]))
    return total / TICK


def available_memory() -> int:
    """Bytes that new processes can take; the system's estimate, or very many if it has none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else 1 << 62


class Session:
    """One runner with its models loaded.

    Args:
        command: what starts it.
        spec: the protocol's first line, see ``runners/serve.py``.
        log: a file for what it prints.
        environment: added to this process's variables.

    Raises:
        PeerError: it cannot run that, or did not come up.
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
        self.peak_memory = 0
        self.setting: object = None  # what it ran last, for whoever drives it
        with log.open("w", encoding="utf-8") as out:
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out,
                    env={**kept, **ADDED, **(environment or {})}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise PeerError(f"{command[0]} cannot be run ({error.strerror})") from None
        self.rest = b""
        try:
            self.version = str(self._ask(spec, LOAD_SECONDS)["version"])
        except BaseException:
            self.close()
            raise

    def run(self, **request: Any) -> Answer:
        """One run; see ``runners/serve.py`` for what it takes.

        Raises:
            PeerError: the peer failed, or took too long.
        """
        wall, all_before = time.perf_counter(), busy()
        own_before = used(self.process.pid) + time.process_time()
        found = self._ask(request, RUN_SECONDS)
        wall, all_after = time.perf_counter() - wall, busy()
        own = used(self.process.pid) + time.process_time() - own_before
        others = None
        if all_before is not None and all_after is not None:
            others = max(0.0, (all_after - all_before - own) / wall)
        self.peak_memory = found["peak_memory"]
        return Answer(found["ids"], found["first"], found["seconds"], self.peak_memory, others)

    def _ask(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        """Send a line and wait at most ``limit`` seconds for the answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + limit, limit))
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _line(self, deadline: float, limit: float) -> bytes:
        """The next line of the runner's stdout."""
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([pipe], [], [], min(LOOK_SECONDS, max(0.0, left)))
            if not ready:
                if self.process.poll() is not None:  # a child of its may hold the pipe open
                    raise self._ended()
                if left <= 0:
                    raise PeerError(f"no answer within {limit:.0f} s; its log: {self.log}")
                continue
            read = os.read(pipe, 1 << 16)
            if not read:
                raise self._ended()
            self.rest += read
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def _ended(self) -> PeerError:
        """The process is gone."""
        return PeerError(f"it ended with code {self.process.wait()}; its log: {self.log}")

    def close(self) -> None:
        """End the process and wait for it; what it had started too."""
        children = processes(self.process.pid)[1:]
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, 9)


class Pool(Generic[K]):
    """Sessions by key, opened when needed; those used longest ago are closed when memory is short.

    Args:
        open_: makes the session of a key.
        need: bytes that it will take, as far as nothing better is known.
    """

    def __init__(
        self,
        open_: Callable[[K], Session],
        need: Callable[[K], int],
        available: Callable[[], int] = available_memory,
    ) -> None:
        self.open, self.need, self.available = open_, need, available
        self.sessions: dict[K, Session] = {}
        self.peaks: dict[K, int] = {}

    def get(self, key: K) -> tuple[Session, bool]:
        """The session, and True if it was opened anew (and is cold)."""
        session = self.sessions.pop(key, None)
        fresh = session is None
        if session is None:
            needed = self.peaks.get(key) or self.need(key)
            while self.sessions and self.available() < needed:
                self.drop(next(iter(self.sessions)))
            session = self.open(key)
        self.sessions[key] = session  # the last one used stands last
        return session, fresh

    def drop(self, key: K) -> None:
        """Close that session, if it is open."""
        session = self.sessions.pop(key, None)
        if session is not None:
            self.peaks[key] = session.peak_memory
            session.close()

    def close(self) -> None:
        """Close all."""
        for key in list(self.sessions):
            self.drop(key)
