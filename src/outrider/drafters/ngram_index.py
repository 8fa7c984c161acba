"""The index of prompt lookup; like that of suffix decoding it does not depend on the engine."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.config import EngineConfig

Gram = tuple[int, ...]
LOOKUP_WINDOW = 16384
"""Tokens that are looked up unless a window is given."""


def lookup_window(config: EngineConfig, name: str) -> int:
    """Return the number of last tokens that the lookup drafter of that name sees."""
    return config.window_of(name) or LOOKUP_WINDOW


class NgramIndex:
    """The place where each n-gram of the last ``window`` tokens was last continued.

    A token enters once and leaves once, with ``max_n - min_n + 1`` entries, in bounded time.
    """

    def __init__(self, min_n: int, max_n: int, window: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._window = window
        self._ends: dict[Gram, int] = {}
        self._known = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Enter the n-grams of ``tokens`` that have a continuation by now, and drop old ones."""
        if self._known < len(tokens) - 1 - self._window:
            self._ends.clear()  # all of it lies outside the window by now
            self._known = len(tokens) - 1 - self._window
        for end in range(self._known, len(tokens) - 1):
            for n in self._sizes:
                if n <= end + 1:
                    self._ends[tuple(tokens[end + 1 - n : end + 1])] = end
            old = end - self._window
            for n in self._sizes:
                if old + 1 - n >= 0:
                    gram = tuple(tokens[old + 1 - n : old + 1])
                    if self._ends.get(gram) == old:
                        del self._ends[gram]
        self._known = max(self._known, len(tokens) - 1)

    def propose(self, tokens: Sequence[int], length: int) -> list[int]:
        """Return up to ``length`` tokens that followed the longest known tail of ``tokens``.

        A match that reaches the end of the text goes on into the draft itself: a loop is
        continued as a loop.
        """
        for n in self._sizes:
            end = self._ends.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if end is not None:
                draft: list[int] = []
                for i in range(end + 1, end + 1 + length):
                    draft.append(tokens[i] if i < len(tokens) else draft[i - len(tokens)])
                return draft
        return []
