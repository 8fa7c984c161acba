"""Load shapes: when requests are due, or how many run at once."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError

EXPONENTIAL = "exponential"


@dataclass(frozen=True)
class Closed:
    """``concurrency`` requests at once; their starts are evenly spread over ``ramp`` seconds."""

    concurrency: int
    ramp: float = 0.0

    @property
    def label(self) -> str:
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class Open:
    """Requests are sent when they are due, whether or not earlier ones have ended.

    Gaps are gamma-distributed with mean 1 / rate and shape ``burstiness``: 1 is a Poisson process,
    below 1 is burstier, infinity is evenly spaced. An infinite rate sends all at once. ``end`` is
    the rate at the last request, reached linearly, or geometrically if ``exponential``.
    """

    rate: float
    burstiness: float = 1.0
    end: float | None = None
    exponential: bool = False

    @property
    def label(self) -> str:
        ramp = "" if self.end is None else f" to {self.end:g}"
        return f"{self.rate:g}{ramp} requests/s"

    def times(self, seed: int, count: int) -> Iterator[float]:
        """Yield when ``count`` requests are due: seconds from the start, in order."""
        random, now = np.random.default_rng(seed), 0.0
        for i in range(count):
            rate = self._rate(i / max(count - 1, 1))
            yield now
            if math.isinf(self.burstiness):
                now += 1 / rate
            elif not math.isinf(rate):
                now += float(random.gamma(self.burstiness, 1 / (rate * self.burstiness)))

    def _rate(self, share: float) -> float:
        if self.end is None:
            return self.rate
        if self.exponential:
            return float(self.rate * (self.end / self.rate) ** share)
        return self.rate + (self.end - self.rate) * share


@dataclass(frozen=True)
class Trace:
    """Requests are due at recorded times: seconds from the start, in order."""

    name: str
    due: tuple[float, ...]

    @property
    def label(self) -> str:
        return f"trace {self.name}"

    def times(self, seed: int, count: int) -> Iterator[float]:
        yield from self.due[:count]


Shape = Closed | Open | Trace


def check(shape: Shape) -> Shape:
    """Return the shape. Raises ConfigError: a number is out of its range."""
    if isinstance(shape, Closed) and (shape.concurrency < 1 or not 0 <= shape.ramp < math.inf):
        raise ConfigError(
            f"concurrency is {shape.concurrency} with a ramp of {shape.ramp:g} s; give 1 or more, "
            "and a ramp of 0 or more."
        )
    if isinstance(shape, Open):
        if not (shape.rate > 0 and (shape.end is None or 0 < shape.end < math.inf > shape.rate)):
            why = "a rate must be above 0, and finite where it changes."
            raise ConfigError(f"{shape.label}: {why}")
        if not shape.burstiness > 0:
            raise ConfigError(f"burstiness is {shape.burstiness:g}; give more than 0, 1 = Poisson.")
    return shape


def load_trace(file: str) -> Trace:
    """Return the trace in a JSON-lines file, whose first request is due at once.

    A line is a number of seconds, or an object whose ``timestamp`` is in milliseconds, as in the
    traces that Mooncake published. Raises ConfigError: the file cannot be read, or a line is
    malformed.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = f"trace {file} cannot be read ({error}); give a JSON-lines file."
        raise ConfigError(why) from None
    due = [_due(file, i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not due:
        raise ConfigError(f"trace {file} is empty; give it one time at least.")
    due.sort()
    return Trace(Path(file).name, tuple(time - due[0] for time in due))


def _due(file: str, number: int, line: str) -> float:
    """Return the seconds of one line."""
    try:
        value: Any = json.loads(line)
        seconds = value["timestamp"] / 1000 if isinstance(value, dict) else value
        if isinstance(seconds, bool) or not math.isfinite(seconds):
            raise ValueError
    except (ValueError, OverflowError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"trace {file}, line {number}: give seconds as a number, or an object with a "
            "timestamp in milliseconds."
        ) from None
    return float(seconds)
