"""A thread that scrapes one engine again and again, and keeps its latest figures."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ...base.outside.text import printable
from ...errors import EndpointError
from ..diagnose.endpoint import SECONDS, Endpoint
from ..metrics import Page
from .figures import Figures, figures_of, model_of

WINDOW = 60.0
"""Seconds that rates and percentiles look back, or one interval where that is longer."""
LONGEST = 500
"""Most characters of a line on the engine's state."""
Say = Callable[[str], None]


class Window:
    """The pages of an engine that rates and percentiles look back on.

    Args:
        seconds: how far.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pages: deque[tuple[float, Page]] = deque()

    def take(self, page: Page, now: float) -> Figures | None:
        """Return the figures as of a page; None where it is of no engine that is supported.

        ``now`` are seconds of any clock that only goes forward.
        """
        pages = self._pages
        if pages and page.restarted(pages[-1][1]):
            pages.clear()  # counts of before say nothing about those of now
        while len(pages) > 1 and now - pages[1][0] >= self._seconds:
            pages.popleft()
        start, before = pages[0] if pages else (now, None)
        found = figures_of(page, before, now - start)
        if found is not None:
            pages.append((now, page))
        return found

    def clear(self) -> None:
        """Forget all pages."""
        self._pages.clear()


class Watcher(threading.Thread):
    """Scrapes an engine every ``interval`` seconds until ``stop``.

    Args:
        say: gets a line when the engine's state changes.

    Attributes:
        model: its name as the metrics or the API tell, "" if nobody does.
    """

    def __init__(self, endpoint: Endpoint, interval: float, say: Say) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.model = ""
        self._interval = interval
        self._say = say
        self._window = Window(max(WINDOW, interval))
        self._latest: tuple[float, Figures] | None = None
        self._state = ""
        self._stopped = threading.Event()

    def run(self) -> None:
        """Scrape until ``stop``."""
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self.look()
            except Exception as error:  # a page that nobody thought of must not end the thread
                self._lose(f"{self.endpoint.url}/metrics cannot be read ({error!r:.200}).")
            self._stopped.wait(max(0.0, self._interval - (time.monotonic() - began)))

    def stop(self) -> None:
        """End the thread after the scrape that runs."""
        self._stopped.set()

    @property
    def figures(self) -> Figures | None:
        """The figures of the last scrape; None if it failed, or is too old to be true."""
        latest = self._latest
        oldest = time.monotonic() - 3 * self._interval - SECONDS
        return None if latest is None or latest[0] < oldest else latest[1]

    def look(self) -> None:
        """Scrape once."""
        try:
            page = self.endpoint.metrics()
        except EndpointError as error:
            self._lose(str(error))
            return
        if page is None:
            self._lose(f"{self.endpoint.url}/metrics is refused; check address, switch and key.")
            return
        self.model = model_of(page) or self.model or self._asked()
        self.take(page, time.monotonic())

    def _asked(self) -> str:
        """Return the model's name as the API tells, "" if it does not."""
        try:
            return self.endpoint.model()
        except EndpointError:
            return ""

    def take(self, page: Page, now: float) -> None:
        """Take a page that was read at ``now``, in seconds of any clock that only goes forward."""
        found = self._window.take(page, now)
        if found is None:
            self._lose(f"{self.endpoint.url}/metrics has no metrics of a supported engine.")
            return
        self._latest = now, found
        self._tell(f"{self.endpoint.url} answers: {found.engine}, model {self.model or 'unknown'}")

    def _lose(self, why: str) -> None:
        self._window.clear()
        self._latest = None
        self._tell(why)

    def _tell(self, state: str) -> None:
        state = printable(state, LONGEST)
        if state != self._state:
            self._state = state
            self._say(state)
