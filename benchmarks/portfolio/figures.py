"""Ratios of the speeds of a cell's rounds, their intervals, and the mixture of all cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, variance

from outrider.bench.intervals import student

from .cells import AUTO, FIXED, PLAIN

LEAST_ROUNDS = 4
"""Rounds of a cell before its interval counts."""
Z = NormalDist().inv_cdf(0.975)

Speeds = Mapping[str, Sequence[float]]
"""Tokens a second by choice, a value a round."""


@dataclass(frozen=True)
class Estimate:
    """The mean of logarithms, and the variance of that mean; None where rounds are too few."""

    log: float
    variance: float | None
    quantile: float = Z

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of the logarithm."""
        return math.inf if self.variance is None else self.quantile * math.sqrt(self.variance)

    def __str__(self) -> str:
        shown = f"{math.exp(self.log):.3f}"
        if self.variance is None:
            return shown
        low, high = (math.exp(self.log + side * self.half_width) for side in (-1, 1))
        return f"{shown} [{low:.3f} {high:.3f}]"


def estimate(logs: Sequence[float]) -> Estimate:
    """Return the mean of independent values with Student's interval."""
    if len(logs) < LEAST_ROUNDS:
        return Estimate(mean(logs), None)
    return Estimate(mean(logs), variance(logs) / len(logs), student(len(logs) - 1))


def _logs(values: Iterable[float]) -> list[float]:
    return [math.log(value) for value in values]


def best_fixed(speeds: Speeds, rounds: Iterable[int]) -> str:
    """Return the fixed choice that is fastest over these rounds."""
    rounds = list(rounds)
    return max(FIXED, key=lambda name: mean(_logs(speeds[name][i] for i in rounds)))


def against_best(speeds: Speeds) -> Estimate:
    """Return auto over the best fixed choice.

    That is picked on the odd rounds and compared on the even ones, and the other way round, so
    that it is not the one that happened to be lucky. A single round has to do for both.
    """
    count = len(speeds[AUTO])
    logs: list[float] = []
    for half in (0, 1):
        compared = range(half, count, 2)
        if compared:
            best = best_fixed(speeds, range(1 - half, count, 2) if count > 1 else compared)
            logs += (math.log(speeds[AUTO][i] / speeds[best][i]) for i in compared)
    return estimate(logs)


def against(speeds: Speeds, name: str) -> Estimate:
    """Return auto over another choice, round by round."""
    pairs = zip(speeds[AUTO], speeds[name], strict=True)
    return estimate([math.log(auto / other) for auto, other in pairs])


def geometric_mean(parts: Sequence[Estimate]) -> Estimate:
    """Return the mean over cells, whose rounds are independent of each other."""
    known = [part.variance for part in parts if part.variance is not None]
    spread = sum(known) / len(parts) ** 2 if len(known) == len(parts) else None
    return Estimate(mean(part.log for part in parts), spread)


def mixture(cells: Sequence[Speeds], name: str) -> Estimate:
    """Return the time of a choice over auto's, for as many tokens of every cell.

    Its variance is that of the logarithm's linear form in the cells' logarithms of speed.
    """
    total = {
        choice: [math.exp(-mean(_logs(cell[choice]))) for cell in cells] for choice in (AUTO, name)
    }
    auto, other = sum(total[AUTO]), sum(total[name])
    spread: float | None = 0.0
    for cell, mine, theirs in zip(cells, total[AUTO], total[name], strict=True):
        parts = [
            math.log(a) * mine / auto - math.log(b) * theirs / other
            for a, b in zip(cell[AUTO], cell[name], strict=True)
        ]
        few = len(parts) < LEAST_ROUNDS or spread is None
        spread = None if few or spread is None else spread + variance(parts) / len(parts)
    return Estimate(math.log(other / auto), spread)


def rows(cells: Mapping[str, Speeds]) -> list[tuple[str, ...]]:
    """Return the table's rows: cell, best fixed choice, auto over it and over plain, rounds."""
    return [
        (
            name,
            best_fixed(speeds, range(len(speeds[AUTO]))),
            str(against_best(speeds)),
            str(against(speeds, PLAIN)),
            str(len(speeds[AUTO])),
        )
        for name, speeds in cells.items()
    ]
