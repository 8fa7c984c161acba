"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence


def longest_start(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest tail of ``text`` that may become one of ``strings``."""
    longest = min(len(text), max(map(len, strings)) - 1)
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(s.startswith(text[-n:]) for s in strings)), 0)


class StopFinder:
    """Passes text on up to the first complete stop string; holds back what may become one."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text, if any."""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return (the text that may be shown, whether a stop string ended it)."""
        if self.stopped_by is not None:
            return "", True
        if not self._stop:
            return text, False
        for char in text:
            self._held += char
            complete = [s for s in self._stop if self._held.endswith(s)]
            if complete:
                self.stopped_by = max(complete, key=len)
                end = len(self._held) - (0 if self._include else len(self.stopped_by))
                shown, self._held = self._held[:end], ""
                return shown, True
        end = len(self._held) - longest_start(self._held, self._stop)
        shown, self._held = self._held[:end], self._held[end:]
        return shown, False

    def flush(self) -> str:
        """Return the text that is held back, at the end of all text."""
        held, self._held = self._held, ""
        return held
