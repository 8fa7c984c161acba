"""A replica as a queue: how long requests take, by how many of them come.

Requests come at random (Poisson) and begin in order of arrival. A prompt holds up the others; then
all sequences get tokens at one speed, by their number. Nothing is cached or preempted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import NamedTuple

Work = Callable[[Random], float]
"""Draws the tokens of a request after its first."""
WARM_UP = 0.1
"""Share of the requests that do not count: the first ones find an empty replica."""
LEAST_SECONDS = 1e-12


@dataclass(frozen=True)
class Replica:
    """A server with a queue.

    ``prefill`` are the seconds of a prompt, ``token`` those between two tokens of a sequence where
    1, 2, ... sequences run: as many as it has entries run at once.
    """

    prefill: float
    token: tuple[float, ...]

    def limit(self, tokens: float) -> float:
        """Return the requests per second that it sustains, of ``tokens`` after the first each."""
        taken = [self.prefill + tokens * each / n for n, each in enumerate(self.token, 1)]
        return 1 / max(min(taken), LEAST_SECONDS)


class Done(NamedTuple):
    """The seconds of a request: until it began, to its first token, between two, to the last."""

    wait: float
    ttft: float
    tpot: float
    e2e: float


class QueueRun(NamedTuple):
    """The requests that count, and the mean number of sequences that ran."""

    done: list[Done]
    running: float

    def at(self, level: str, share: float) -> float:
        """Return a percentile of ``wait``, ``ttft``, ``tpot`` or ``e2e``; 0.95 is P95."""
        return percentile([getattr(each, level) for each in self.done], share)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(ceil(share * len(values)), 1) - 1]


def simulate(replica: Replica, rate: float, work: Work, requests: int, seed: int = 0) -> QueueRun:
    """Return what happens until so many requests are done, which come at ``rate`` a second.

    Arrivals and work are the same for all replicas at a rate.
    """
    arrivals, lengths = Random(seed), Random(seed + 1)
    done: list[Done] = []
    waiting: deque[float] = deque()
    # By the tokens that are given when a sequence ends; then arrival, begin, first token, tokens.
    running: list[tuple[float, float, float, float, float]] = []
    # ``given`` counts the tokens of a sequence that would run from the beginning on.
    now = given = occupied = 0.0
    coming = arrivals.expovariate(rate)
    while len(done) < requests:
        while coming <= now:
            waiting.append(coming)
            coming += arrivals.expovariate(rate)
        if waiting and len(running) < len(replica.token):
            arrival, begin, tokens = waiting.popleft(), now, work(lengths)
            now += replica.prefill
            occupied += replica.prefill * (len(running) + 1)
            heapq.heappush(running, (given + tokens, arrival, begin, now, tokens))
        elif not running:
            now = coming
        else:
            each = replica.token[len(running) - 1]
            end = now + (running[0][0] - given) * each
            occupied += (min(end, coming) - now) * len(running)
            if end <= coming:
                given, arrival, begin, first, tokens = heapq.heappop(running)
                between = (end - first) / tokens if tokens else 0.0
                done.append(Done(begin - arrival, first - arrival, between, end - arrival))
                now = end
            else:
                given += (coming - now) / each
                now = coming
    return QueueRun(done[int(WARM_UP * requests) :], occupied / now if now else 0.0)
