"""Predicts what steps and drafts take, and corrects its predictions by what they took."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SMOOTHING = 0.05
"""Weight of the newest measurement, once there are many."""
PULL = 4.0
"""Measurements that a size needs before its own count as much as those of all sizes."""
SPIKE = 1.5
"""A measurement counts as this many times what was expected at most, and at least its inverse."""
TRUSTED = 4
"""Measurements before spikes are cut."""


class Curve(NamedTuple):
    """Seconds by a number of rows: straight between points, on with the last slope behind them.

    ``rows`` rise from 1 on; ``seconds`` do not fall.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: int) -> float:
        """Return the seconds of ``rows`` rows, 0 for none."""
        if rows <= 0:
            return 0.0
        last = len(self.rows) - 1
        right = min(max(bisect_right(self.rows, rows), 1), last)
        if right == 0:
            return self.seconds[0]
        left = right - 1
        share = (rows - self.rows[left]) / (self.rows[right] - self.rows[left])
        return self.seconds[left] + max(share, 0.0) * (self.seconds[right] - self.seconds[left])


@dataclass(frozen=True)
class DraftCosts:
    """The seconds of one drafter: ``passes`` by sequences in a pass, and ``call`` once a step.

    A drafter without passes proposes a whole draft at once.
    """

    passes: Curve | None = None
    call: float = 0.0
    per_sequence: float = 0.0

    def at(self, counts: Sequence[int]) -> float:
        """Return the seconds where ``counts[i]`` sequences draft a token at depth i + 1."""
        if not counts or not counts[0]:
            return 0.0
        seconds = self.call + self.per_sequence * counts[0]
        if self.passes is not None:
            seconds += sum([self.passes.at(count) for count in counts])
        return seconds


@dataclass(frozen=True)
class Costs:
    """The seconds of a target and its drafters, as measured or guessed.

    ``per_context`` is the time that a step takes for each token of the context of a sequence.
    """

    target: Curve
    drafters: Mapping[str, DraftCosts]
    per_context: float = 0.0


@dataclass
class _Ratio:
    """A running mean of measured over predicted seconds."""

    value: float = 1.0
    seen: int = 0

    def observe(self, ratio: float) -> None:
        if self.seen >= TRUSTED:
            ratio = min(max(ratio, self.value / SPIKE), self.value * SPIKE)
        self.seen += 1
        self.value += max(SMOOTHING, 1 / self.seen) * (ratio - self.value)


@dataclass
class _Correction:
    """Ratios of measured to predicted seconds, of all sizes and by powers of two."""

    overall: _Ratio = field(default_factory=_Ratio)
    sizes: dict[int, _Ratio] = field(default_factory=dict)

    def at(self, size: int) -> float:
        own = self.sizes.get(size.bit_length())
        if own is None:
            return self.overall.value
        return (own.seen * own.value + PULL * self.overall.value) / (own.seen + PULL)

    def observe(self, size: int, ratio: float) -> None:
        self.overall.observe(ratio)
        self.sizes.setdefault(size.bit_length(), _Ratio()).observe(ratio)


class CostModel:
    """The costs of one engine: a prior, corrected by what its steps take."""

    def __init__(self, prior: Costs) -> None:
        self.prior = prior
        self._target = _Correction()
        self._drafters = {name: _Correction() for name in prior.drafters}

    def verify(self, rows: int, context: int) -> float:
        """Return the seconds of a forward of ``rows`` rows over ``context`` tokens in all."""
        prior = self.prior
        seconds = prior.target.at(rows) + prior.per_context * context
        return seconds * self._target.at(rows)

    def draft(self, name: str, counts: Sequence[int]) -> float:
        """Return the seconds of a drafter, see ``DraftCosts.at``."""
        if not counts or not counts[0]:
            return 0.0
        return self.prior.drafters[name].at(counts) * self._drafters[name].at(counts[0])

    def observe_verify(self, rows: int, context: int, seconds: float) -> None:
        """Take in what a forward took."""
        prior = self.prior.target.at(rows) + self.prior.per_context * context
        self._target.observe(rows, seconds / prior)

    def observe_draft(self, name: str, counts: Sequence[int], seconds: float) -> None:
        """Take in what a drafter took."""
        prior = self.prior.drafters[name].at(counts)
        if prior > 0:
            self._drafters[name].observe(counts[0], seconds / prior)
