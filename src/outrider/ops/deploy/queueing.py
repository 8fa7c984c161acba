"""A replica as a queue: how long requests take at a given rate of arrivals.

Requests arrive at random (Poisson) and begin in order. A prefill stalls running sequences; else all
get tokens at one speed, which depends on their number. Nothing is cached or preempted.
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
"""Share of the requests, the first ones, that do not count: they find an empty replica."""
LEAST_SECONDS = 1e-12


@dataclass(frozen=True)
class Replica:
    """A server with a queue.

    ``prefill`` is the seconds of a prompt. ``token`` is the seconds between two tokens of a
    sequence while 1, 2, ... sequences run; at most ``len(token)`` sequences run at once.
    """

    prefill: float
    token: tuple[float, ...]

    def limit(self, tokens: float) -> float:
        """Return the sustainable requests per second, each with ``tokens`` after the first."""
        taken = [self.prefill + tokens * each / n for n, each in enumerate(self.token, 1)]
        return 1 / max(min(taken), LEAST_SECONDS)


class Done(NamedTuple):
    """The seconds of a request: until it began, to its first token, between tokens, to its end."""

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
    """Return a simulation until ``requests`` requests are done, which arrive at ``rate`` a second.

    At one rate and seed, arrivals and work are the same for all replicas.
    """
    arrivals, lengths = Random(seed), Random(seed + 1)
    done: list[Done] = []
    waiting: deque[float] = deque()
    # A heap: ``given`` at a sequence's end, its arrival, begin, first token, and number of tokens.
    running: list[tuple[float, float, float, float, float]] = []
    # ``given`` counts the tokens of a sequence that ran from the start of the simulation.
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
