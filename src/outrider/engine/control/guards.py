"""Pauses drafting where it loses against plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from .tuning import Tuning


@dataclass
class _Guard:
    """The plain steps that drafting lost at one batch size, and until when it pauses."""

    pause: int
    deficit: float = 0.0
    until: int = 0


@dataclass
class Guards:
    """The guards of all batch sizes, one for each power of two."""

    tuning: Tuning
    _by_size: dict[int, _Guard] = field(default_factory=dict)

    def pauses(self, streams: int, step: int) -> bool:
        """Return True if drafting pauses for so many streams."""
        guard = self._by_size.get(streams.bit_length())
        return guard is not None and step < guard.until

    def observe(self, streams: int, step: int, lost: float) -> None:
        """Take in the plain steps that drafted steps lost; negative ones were won."""
        size, tuning = streams.bit_length(), self.tuning
        most = tuning.lost_steps + tuning.luck_steps / 2 ** ((size - 1) / 2)
        guard = self._by_size.get(size)
        if guard is None:
            guard = self._by_size[size] = _Guard(tuning.first_pause)
        guard.deficit = max(-most, guard.deficit + lost)
        if guard.deficit > most:
            guard.until = step + guard.pause
            guard.pause = min(2 * guard.pause, tuning.longest_pause)
            guard.deficit = tuning.half_open * most  # the next trial loses sooner
        elif guard.deficit == -most:
            guard.pause = tuning.first_pause

    def left(self, step: int) -> dict[int, int]:
        """Return the steps for which drafting still pauses, by each guard's smallest batch size."""
        return {
            2**size >> 1: guard.until - step
            for size, guard in self._by_size.items()
            if guard.until > step
        }
