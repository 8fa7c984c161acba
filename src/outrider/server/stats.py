"""``GET /stats``: the last requests in figures, for people and small scripts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

from ..outputs import RequestState
from ..types import Counts

KEPT = 1000
"""Requests over which percentiles go."""


class Stats:
    """Counts since the start, and the times of the last requests."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.counts = Counts()
        self.requests = 0
        self.tokens = 0
        self._latencies: deque[float] = deque(maxlen=KEPT)
        self._ttfts: deque[float] = deque(maxlen=KEPT)
        self._tpots: deque[float] = deque(maxlen=KEPT)

    def add(self, state: RequestState) -> None:
        """Count a request that ended well."""
        latency = time.perf_counter() - state.started
        tokens = sum(len(sample.token_ids) for sample in state.samples)
        self.requests += 1
        self.tokens += tokens
        self.counts.add(state.counts)
        self._latencies.append(latency)
        if state.ttft is not None:
            self._ttfts.append(state.ttft)
            if tokens > 1:
                self._tpots.append((latency - state.ttft) / (tokens - 1))

    def as_json(self) -> dict[str, Any]:
        """Return times in seconds; rates and percentiles are null where nothing was measured."""
        seconds = time.perf_counter() - self.start
        counts = self.counts
        latency = percentiles(self._latencies)
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
            **{f"latency_{name}": value for name, value in latency.items()},
            "ttft": percentiles(self._ttfts),
            "tpot": percentiles(self._tpots),
        }


def percentiles(values: Sequence[float] | deque[float]) -> dict[str, float | None]:
    """Return P50, P90, P95 and P99, each null without values."""
    if not values:
        return dict.fromkeys(("p50", "p90", "p95", "p99"))
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {f"p{p}": cuts[p - 1] for p in (50, 90, 95, 99)}
