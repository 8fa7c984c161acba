"""Prompt lookup: continue as the same few tokens were continued before.

Saxena, "Prompt Lookup Decoding" (2023), with an index instead of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..limits import LOOKUP, check_number
from ..types import SequenceState
from .base import ChainDrafter, DrafterContext, DrafterSpec, Needs

Gram = tuple[int, ...]
ENTRY_BYTES, ID_BYTES = 180, 8
"""What an n-gram in an index takes at most, and what each of its ids adds."""
LOOKUP_WINDOW = 16384
"""Tokens that are looked up unless a window is given."""


class NgramIndex:
    """The place where each n-gram of one sequence was last continued.

    Every token enters once and leaves once, with ``max_n - min_n + 1`` entries each, so the cost
    of a token is bounded whatever the length of the text.

    Args:
        min_n, max_n: shortest and longest n-gram.
        window: only the last so many tokens are looked up.
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


@dataclass(frozen=True)
class NgramSpec(DrafterSpec):
    """Prompt lookup; ``prompt_lookup_min`` and ``_max`` are its shortest and longest n-gram.

    Raises:
        ConfigError: a size is out of its range.
    """

    name = "ngram"
    wants = "memory for indices"
    costs = "a lookup, microseconds"
    suits = "text that repeats its prompt or itself: edits, summaries, answers from documents"
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        for name, number in LOOKUP.items():
            check_number(name, getattr(self, name), number)

    def needs(self, context: DrafterContext) -> Needs:
        sizes = range(self.prompt_lookup_min, self.prompt_lookup_max + 1)
        token_bytes = sum(ENTRY_BYTES + ID_BYTES * n for n in sizes)
        return Needs(page_bytes=token_bytes * context.config.page_size)

    def make(self, context: DrafterContext) -> NgramDrafter:
        config = context.config
        window = config.window_of(self.name) or LOOKUP_WINDOW
        sizes = (self.prompt_lookup_min, self.prompt_lookup_max)
        return NgramDrafter(config.max_draft_length, *sizes, window)


class NgramDrafter(ChainDrafter):
    """Prompt lookup over prompt and output: longest match first.

    Args:
        min_n, max_n: shortest and longest n-gram, 1 or more.
        window: how many of the last tokens are looked up.

    Raises:
        ConfigError: the sizes are out of order.
    """

    name = "ngram"

    def __init__(
        self, max_length: int, min_n: int = 2, max_n: int = 4, window: int = LOOKUP_WINDOW
    ) -> None:
        if not 1 <= min_n <= max_n or window < 1:
            raise ConfigError(
                f"ngram sizes are {min_n} to {max_n} over a window of {window}; "
                "give 1 <= min_n <= max_n and a window of 1 or more."
            )
        super().__init__(max_length)
        self._sizes = (min_n, max_n, window)

    def draft(self, sequence: SequenceState, length: int) -> list[int]:
        index = self._states.setdefault(sequence.id, NgramIndex(*self._sizes))
        index.extend(sequence.tokens)
        drafted: list[int] = index.propose(sequence.tokens, length)
        return drafted
