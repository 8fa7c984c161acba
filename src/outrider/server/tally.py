"""Counts since the server's start: rates, and requests for ``/stats``."""

import time
from collections import deque
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from ..base.types import Counts
from ..frontend.outputs import RequestState

RATE_SECONDS = 60
KEPT = 1000
"""Requests over which percentiles go."""


class Rate:
    """Things a second, over the last minute or the time since the start if that is shorter."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        # The last seconds, and how many in each.
        self._counts: deque[tuple[int, int]] = deque(maxlen=RATE_SECONDS + 1)

    def add(self, count: int) -> None:
        """Count things that have just happened."""
        now = int(time.perf_counter())
        if not self._counts or self._counts[-1][0] != now:
            self._counts.append((now, 0))
        self._counts[-1] = (now, self._counts[-1][1] + count)

    def value(self) -> float:
        """Return things a second."""
        now = time.perf_counter()
        total = sum(count for second, count in self._counts if second >= now - RATE_SECONDS)
        return total / min(RATE_SECONDS, max(1.0, now - self._start))


class Stats:
    """Counts since the start, and the times of the last requests."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.counts = Counts()
        self.requests = 0
        self.tokens = 0
        self._times: dict[str, deque[float]] = {
            name: deque(maxlen=KEPT) for name in ("latency", "ttft", "tpot")
        }

    def add(self, state: RequestState) -> None:
        """Count a request that ended well."""
        latency = time.perf_counter() - state.started
        tokens = sum(len(sample.token_ids) for sample in state.samples)
        self.requests += 1
        self.tokens += tokens
        self.counts.add(state.counts)
        self._times["latency"].append(latency)
        if state.ttft is not None:
            self._times["ttft"].append(state.ttft)
            if tokens > 1:
                self._times["tpot"].append((latency - state.ttft) / (tokens - 1))

    def as_json(self) -> dict[str, Any]:
        """Return times in seconds; rates and percentiles are null where nothing was measured."""
        seconds = time.perf_counter() - self.start
        counts = self.counts
        times = {name: percentiles(values) for name, values in self._times.items()}
        return {
            "total_requests": self.requests,
            "total_tokens": self.tokens,
            "total_time_seconds": seconds,
            "throughput_tokens_per_second": self.tokens / seconds,
            "total_speculative_tokens": counts.drafted,
            "accepted_speculative_tokens": counts.accepted,
            "acceptance_rate": counts.acceptance_rate,
            "acceptance_length": counts.acceptance_length,
            "acceptance_by_position": counts.acceptance_by_position,
            **{f"latency_{name}": value for name, value in times["latency"].items()},
            "ttft": times["ttft"],
            "tpot": times["tpot"],
        }


def percentiles(values: Sequence[float] | deque[float]) -> dict[str, float | None]:
    """Return P50, P90, P95 and P99, each null without values."""
    if not values:
        return dict.fromkeys(("p50", "p90", "p95", "p99"))
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {f"p{p}": cuts[p - 1] for p in (50, 90, 95, 99)}
