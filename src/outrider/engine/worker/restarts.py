"""Decides when a dead worker is restarted, and when to give up."""

import time
from collections import deque

IDLE_DEATHS, WITHIN_SECONDS = 3, 60.0
"""After ``IDLE_DEATHS`` deaths without a request within this time, no worker is restarted."""
MOST_DOUBLINGS = 10
LONGEST_PAUSE = 30.0
"""Most seconds before a restart: the pause doubles while deaths follow each other."""


class Deaths:
    """Counts deaths of workers. Deaths during requests never end the engine: no client may."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._idle: deque[float] = deque(maxlen=IDLE_DEATHS)
        self._unready = 0  # in a row
        self.failed_starts = 0  # in a row: processes that the system could not start

    def died(self, *, running: bool, ready: bool) -> None:
        """Count a death of a worker, and whether it ran a request, and was ready for one."""
        now = time.monotonic()
        self._recent.append(now)
        while now - self._recent[0] > WITHIN_SECONDS:
            self._recent.popleft()
        self._unready = 0 if ready else self._unready + 1
        if not running:
            self._idle.append(now)

    @property
    def hopeless(self) -> str | None:
        """The reason why another start does not help; None where it may."""
        if len(self._idle) == IDLE_DEATHS and self._idle[-1] - self._idle[0] < WITHIN_SECONDS:
            return f"{IDLE_DEATHS} times within {WITHIN_SECONDS:.0f} s"
        return f"{IDLE_DEATHS} times before it was ready" if self._unready >= IDLE_DEATHS else None

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start: none after one death, then doubling."""
        number = max(len(self._recent) - 1, self.failed_starts)
        return min(LONGEST_PAUSE, 2.0 ** min(number - 1, MOST_DOUBLINGS)) if number else 0.0
