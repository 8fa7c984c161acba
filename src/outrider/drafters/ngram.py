"""Prompt lookup: draft what followed the same few tokens earlier in the text.

Saxena, "Prompt Lookup Decoding" (2023), with an index instead of a search.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.limits import LOOKUP, check_number
from ..base.types import SequenceState
from ..errors import ConfigError
from .base import ChainDrafter, DrafterContext, DrafterSpec, Needs
from .ngram_index import LOOKUP_WINDOW, NgramIndex, lookup_window

ENTRY_BYTES = 180
"""Most bytes of an n-gram in an index, without its ids."""
ID_BYTES = 8
"""Bytes that each of its ids adds."""


@dataclass(frozen=True)
class NgramSpec(DrafterSpec):
    """Prompt lookup; ``prompt_lookup_min`` and ``_max`` are its shortest and longest n-gram."""

    name = "ngram"
    wants = "memory for indices"
    costs = "a lookup, microseconds"
    prior = 0.5
    proposes = (
        "ngram, proposes up to {k} tokens, those that followed the same few earlier in the text"
    )
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
        window = lookup_window(config, self.name)
        sizes = (self.prompt_lookup_min, self.prompt_lookup_max)
        return NgramDrafter(config.max_draft_length, *sizes, window)


class NgramDrafter(ChainDrafter):
    """Prompt lookup over the last ``window`` tokens: the longest n-gram that matches counts.

    Raises ConfigError if the sizes are out of order.
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
