"""Pauses drafting where it loses against plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from .tuning import USUAL, Tuning


@dataclass
class _Guard:
    """Counts what drafting lost at one batch size; it may lose ``most`` plain steps."""

    tuning: Tuning
    most: float
    pause: int
    deficit: float = 0.0
    until: int = 0

    def observe(self, step: int, lost: float) -> None:
        self.deficit = max(-self.most, self.deficit + lost)
        if self.deficit > self.most:
            self.until = step + self.pause
            self.pause = min(2 * self.pause, self.tuning.longest_pause)
            self.deficit = self.tuning.half_open * self.most  # the next trial loses sooner
        elif self.deficit == -self.most:
            self.pause = self.tuning.first_pause


@dataclass
class Guards:
    """The guards of all batch sizes, one for each power of two."""

    tuning: Tuning = USUAL
    _by_size: dict[int, _Guard] = field(default_factory=dict)

    def pauses(self, streams: int, step: int) -> bool:
        """Return True if drafting pauses for so many streams."""
        guard = self._by_size.get(streams.bit_length())
        return guard is not None and step < guard.until

    def observe(self, streams: int, step: int, lost: float) -> None:
        """Take in the plain steps that drafted steps lost; negative ones were won."""
        size = streams.bit_length()
        if size not in self._by_size:
            tuning = self.tuning
            most = tuning.lost_steps + tuning.luck_steps / 2 ** ((size - 1) / 2)
            self._by_size[size] = _Guard(tuning, most, tuning.first_pause)
        self._by_size[size].observe(step, lost)

    def left(self, step: int) -> dict[int, int]:
        """Return the steps for which drafting still pauses, by each guard's smallest batch size."""
        return {
            2**size >> 1: guard.until - step
            for size, guard in self._by_size.items()
            if guard.until > step
        }
