"""How long ``/health`` takes all along, measured in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

EVERY_SECONDS, GIVE_UP_SECONDS = 0.05, 60.0
WORST = 5
"""Of the slowest answers the report has the bodies that ran."""


@dataclass
class Health:
    """What ``/health`` answered: seconds with the bodies that ran, and how often it failed."""

    asked: list[tuple[float, list[int]]] = field(default_factory=list)
    failed: int = 0

    def ask(self, connection: HTTPConnection, running: list[int]) -> None:
        """Ask once."""
        start = time.monotonic()
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self.failed += answer.status != 200
        except (OSError, HTTPException):
            connection.close()
            self.failed += 1
        self.asked.append((time.monotonic() - start, running))

    def report(self) -> dict[str, Any]:
        """Return latencies in seconds, and the bodies that ran during the worst."""
        seconds = [taken for taken, _ in self.asked]
        cuts = quantiles(seconds, n=100) if len(seconds) > 1 else [0.0] * 99
        return {
            "asked": len(seconds), "failed": self.failed, "p50": cuts[49], "p99": cuts[98],
            "max": max(seconds, default=0.0),
            "worst": [
                {"seconds": s, "running": r} for s, r in sorted(self.asked, reverse=True)[:WORST]
            ],
        }  # fmt: skip


@contextmanager
def watched_health(url: str, running: Callable[[], list[int]]) -> Iterator[Health]:
    """Ask a server how it is until the context ends; ``running`` gives the bodies that run."""
    health, end = Health(), threading.Event()
    connection = HTTPConnection(urlsplit(url).netloc, timeout=GIVE_UP_SECONDS)

    def ask() -> None:
        while not end.wait(EVERY_SECONDS):
            health.ask(connection, running())
        connection.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield health
    finally:
        end.set()
        thread.join()
