"""Signs of life: a worker sends one every second, and the frontend judges the worker by them."""

import threading
import time
from collections.abc import Callable, Iterator

from .messages import Beat

BEAT_SECONDS = 1.0
START_SECONDS = 300
"""A new process may be silent that long: it imports torch and the caller's main module first."""
SILENT_SECONDS = 30  # a beat needs the GIL for microseconds; no busy engine holds it that long
WORK_SECONDS = 600  # a step or a command may always take that long: large models on slow disks do
WORK_FACTOR = 20  # a step may take that many times as long as the longest one before it
WARN_SHARE = 0.5
"""Share of a limit at which the frontend warns; at the limit it kills the worker."""


class Pulse:
    """Sends a beat every second, from a thread of its own; the worker's threads set the fields."""

    def __init__(self, send: Callable[[Beat], None]) -> None:
        self.step: int | None = None
        self.command: int | None = None
        self.longest = 0.0
        self._send = send
        threading.Thread(target=self._run, name="outrider-pulse", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._send(Beat(self.step, self.command, self.longest))
            time.sleep(BEAT_SECONDS)


class Watch:
    """Tells a hung worker from a busy one by ticks, one for each second that the frontend runs.

    So the time of a suspended machine or a paused container does not count.
    """

    def __init__(self) -> None:
        self._longest = 0.0
        self.begin()

    def begin(self) -> None:
        """Forget the last worker, but not how long its steps took."""
        self._beat: Beat | None = None
        self._silent = self._step = self._command = 0

    def hear(self, beat: Beat) -> None:
        """Take in a beat; a new step or command restarts its count."""
        last = self._beat or Beat()
        self._step = self._step if beat.step == last.step else 0
        self._command = self._command if beat.command == last.command else 0
        self._longest = max(self._longest, beat.longest)
        self._beat, self._silent = beat, 0

    def tick(self) -> None:
        """Count a second."""
        beat = self._beat or Beat()
        self._silent += 1
        self._step += beat.step is not None
        self._command += beat.command is not None

    def _waits(self) -> Iterator[tuple[int, float, str]]:
        """Yield seconds, their limit and a sentence for everything that can hang."""
        silent, step, command = self._silent, self._step, self._command
        least = START_SECONDS if self._beat is None else SILENT_SECONDS
        yield silent, least, f"the engine has not answered for {silent} s"
        longest = max(WORK_SECONDS, WORK_FACTOR * self._longest)
        yield step, longest, f"the engine has been in one step for {step} s"
        yield command, WORK_SECONDS, f"the engine has been reading one request for {command} s"

    @property
    def complaint(self) -> str | None:
        """The reason why the worker seems to hang; None while it does not."""
        waits = self._waits()
        return next((text for seconds, limit, text in waits if seconds >= WARN_SHARE * limit), None)

    @property
    def hung(self) -> bool:
        """True when the worker must be killed."""
        return any(seconds >= limit for seconds, limit, _ in self._waits())
