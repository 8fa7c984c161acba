"""CPUs of their own for some calls of the native step."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import get_ident
from typing import Any


class Cores:
    """A thread that is pinned to some CPUs and runs calls there, one after the other.

    Threads that it starts run on the same CPUs.
    """

    def __init__(self, cpus: frozenset[int]) -> None:
        self.cpus = cpus
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, "outrider-cores", self._pin)
        self._own = self._thread.submit(get_ident).result()

    def _pin(self) -> None:
        os.sched_setaffinity(0, self.cpus)  # of this thread alone

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``work`` returns on these CPUs; where the thread calls itself, at once."""
        if get_ident() == self._own and os.getpid() == self._process:
            return work(*arguments)
        future = self.begin(work, *arguments)
        try:
            return future.result()
        except BaseException:  # an interrupt does not end the call, whose memory must stay
            wait([future])
            raise

    def begin(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Return what will be told of ``work``, which runs on these CPUs meanwhile."""
        if os.getpid() != self._process:  # a fork has none of the threads
            self._begin()
        return self._thread.submit(work, *arguments)
