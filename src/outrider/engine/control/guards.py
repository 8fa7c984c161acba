"""Pauses drafting where it loses against plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

LOST, LUCK = 1.0, 3.0
"""Plain steps that drafting may lose before it pauses, and the extra steps allowed to a single
stream for bad luck. With several streams luck averages out: it falls with the root of their
number."""
FIRST_PAUSE, LONGEST_PAUSE = 192, 1024
"""Steps without drafts after drafting lost, doubled each time that it loses again."""


@dataclass
class _Guard:
    """Counts what drafting lost at one batch size; it may lose ``most`` plain steps."""

    most: float
    deficit: float = 0.0
    pause: int = FIRST_PAUSE
    until: int = 0

    def observe(self, step: int, lost: float) -> None:
        self.deficit = max(-self.most, self.deficit + lost)
        if self.deficit > self.most:
            self.until = step + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.deficit = 0.75 * self.most  # half open: the next trial loses sooner
        elif self.deficit == -self.most:
            self.pause = FIRST_PAUSE


@dataclass
class Guards:
    """The guards of all batch sizes, one for each power of two."""

    _by_size: dict[int, _Guard] = field(default_factory=dict)

    def pauses(self, streams: int, step: int) -> bool:
        """Return True if drafting pauses for so many streams."""
        guard = self._by_size.get(streams.bit_length())
        return guard is not None and step < guard.until

    def observe(self, streams: int, step: int, lost: float) -> None:
        """Take in the plain steps that drafted steps lost; negative ones were won."""
        size = streams.bit_length()
        if size not in self._by_size:
            self._by_size[size] = _Guard(LOST + LUCK / 2 ** ((size - 1) / 2))
        self._by_size[size].observe(step, lost)

    def left(self, step: int) -> dict[int, int]:
        """Return the steps for which drafting still pauses, by each guard's smallest batch size."""
        return {
            2**size >> 1: guard.until - step
            for size, guard in self._by_size.items()
            if guard.until > step
        }
