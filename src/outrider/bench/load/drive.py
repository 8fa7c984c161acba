"""Runs one load against one server and keeps a record of each request."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from ...base.outside.stamped import Client
from ...errors import EndpointError
from .arrivals import Closed, Open, Shape, Trace
from .stream import Record, read

Progress = Callable[[int, int], None]  # called with the numbers of ended and of failed requests


@dataclass
class Load:
    """The outcome of one load: ``records`` of finished requests, in the order they ended.

    It lasted from ``start``, when the first request was due, to the ``end`` of the last one.
    ``peak`` is the most requests at once; ``cut`` counts those cut off by an interrupt or by the
    end of the duration.
    """

    start: float
    end: float = 0.0
    records: list[Record] = field(default_factory=list)
    peak: int = 0
    cut: int = 0
    interrupted: bool = False

    @property
    def seconds(self) -> float:
        return max(self.end - self.start, 1e-9)


@dataclass(frozen=True)
class LoadLimits:
    """The limits of a load; ``concurrency`` limits an open loop, ``timeout`` each request."""

    requests: int
    seconds: float | None = None
    concurrency: int | None = None
    timeout: float = 600.0


class Driver:
    """Sends encoded requests one after the other, as a load's shape says."""

    def __init__(
        self, client: Client, requests: Sequence[bytes], limits: LoadLimits, progress: Progress
    ) -> None:
        self.client, self.requests, self.limits, self.progress = client, requests, limits, progress
        self.load = Load(time.perf_counter())
        self._running = 0
        self._failed = 0

    async def run(self, shape: Shape, seed: int) -> Load:
        """Return the load's records; after Ctrl-C those of the requests that had ended."""
        load = self.load = Load(time.perf_counter())
        work = self._closed(shape) if isinstance(shape, Closed) else self._open(shape, seed)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.limits.seconds):
                    await work
        except asyncio.CancelledError:
            load.interrupted = True
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        load.end = max((r.end for r in load.records), default=time.perf_counter())
        if self.limits.seconds is not None and load.cut:
            load.end = time.perf_counter()
        return load

    async def _closed(self, shape: Closed) -> None:
        numbers = iter(range(self.limits.requests))
        workers = min(shape.concurrency, self.limits.requests)
        async with asyncio.TaskGroup() as group:
            for i in range(workers):
                group.create_task(self._worker(numbers, shape.ramp * i / shape.concurrency))

    async def _worker(self, numbers: Iterator[int], delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        for number in numbers:
            await self._send(number, time.perf_counter())

    async def _open(self, shape: Open | Trace, seed: int) -> None:
        places = asyncio.Semaphore(self.limits.concurrency or self.limits.requests)
        async with asyncio.TaskGroup() as group:
            for number, offset in zip(count(), shape.times(seed, self.limits.requests)):
                due = self.load.start + offset
                wait = due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._in_turn(places, number, due))
                if not number % 64:
                    await asyncio.sleep(0)  # many may be due at once

    async def _in_turn(self, places: asyncio.Semaphore, number: int, due: float) -> None:
        async with places:
            await self._send(number, due)

    async def _send(self, number: int, due: float) -> None:
        """Send one request, and keep its record unless it was cut off."""
        index = number % len(self.requests)
        record = Record(due, time.perf_counter(), index)
        self._running += 1
        self.load.peak = max(self.load.peak, self._running)
        try:
            async with asyncio.timeout(self.limits.timeout):
                answer = await self.client.send(self.requests[index])
        except TimeoutError:
            record.error = f"no answer within {self.limits.timeout:g} s"
        except EndpointError as error:
            record.error = str(error)
        except asyncio.CancelledError:
            self.load.cut += 1
            raise
        else:
            record.end = time.perf_counter()
            read(answer, record)
        finally:
            self._running -= 1
        record.end = record.end or time.perf_counter()
        self.load.records.append(record)
        self._failed += bool(record.error)
        self.progress(len(self.load.records), self._failed)


async def warm_up(driver: Driver, requests: int, concurrency: int) -> None:
    """Send unmeasured requests. Raises CancelledError: Ctrl-C ended them."""
    if requests:
        limits = LoadLimits(requests, None, None, driver.limits.timeout)
        unmeasured = Driver(driver.client, driver.requests, limits, lambda *_: None)
        if (await unmeasured.run(Closed(concurrency), 0)).interrupted:
            raise asyncio.CancelledError
