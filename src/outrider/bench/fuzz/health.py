"""How long ``/health`` takes all along, measured in a thread of its own."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

EVERY_SECONDS, GIVE_UP_SECONDS = 0.05, 60.0
WORST = 5
"""Of the slowest answers the report has the bodies that ran."""


class Health:
    """Asks a server how it is until the context ends.

    Args:
        url: of the server.
        running: gives the indices of the bodies that run.
    """

    def __init__(self, url: str, running: Callable[[], list[int]]) -> None:
        self.netloc = urlsplit(url).netloc
        self.running = running
        self.seconds: list[float] = []
        self.worst: list[tuple[float, list[int]]] = []
        self.failed = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self.netloc, timeout=GIVE_UP_SECONDS)
        while not self._end.wait(EVERY_SECONDS):
            start, running = time.monotonic(), self.running()
            try:
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
                self.failed += answer.status != 200
            except (OSError, http.client.HTTPException):
                connection.close()
                self.failed += 1
            self._note(time.monotonic() - start, running)
        connection.close()

    def _note(self, seconds: float, running: list[int]) -> None:
        self.seconds.append(seconds)
        self.worst = sorted([*self.worst, (seconds, running)], reverse=True)[:WORST]

    def report(self) -> dict[str, Any]:
        """Latencies in seconds, and the bodies that ran during the worst."""
        cuts = quantiles(self.seconds, n=100) if len(self.seconds) > 1 else [0.0] * 99
        return {
            "asked": len(self.seconds), "failed": self.failed, "p50": cuts[49], "p99": cuts[98],
            "max": max(self.seconds, default=0.0),
            "worst": [{"seconds": s, "running": r} for s, r in self.worst],
        }  # fmt: skip
