"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Passes text on up to the first stop string and holds back what may become one.

    Args:
        stop: strings that end the text, none of them empty; the earliest to be complete wins, the
            one that begins first among those.
        include: the stop string is shown as well.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self._ended = False
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text: (what may be shown, whether a stop string has been found)."""
        if self._ended:
            return "", True
        if not self._stop:
            return text, False
        for char in text:
            self._held += char
            found = [s for s in self._stop if self._held.endswith(s)]
            if found:
                self.found = max(found, key=len)
                end = len(self._held) - (0 if self._include else len(self.found))
                shown, self._held, self._ended = self._held[:end], "", True
                return shown, True
        keep = self._longest_start()
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown, False

    def _longest_start(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        longest = min(len(self._held), max(len(s) for s in self._stop) - 1)
        for size in range(longest, 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stop):
                return size
        return 0

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
