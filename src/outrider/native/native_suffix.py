"""The index of suffix decoding in C++."""

from __future__ import annotations

from collections.abc import Sequence

from .checks import free_with
from .interface import Followed
from .library import Library


class NativeIndex:
    """``drafters.suffix_index.SuffixIndex`` in C++, with the same results."""

    def __init__(self, step: Library, room: int) -> None:
        self._step = step
        self.handle = step.new_suffix(room)
        free_with(self, step.free, "suffix", self.handle)

    def extend(self, tokens: Sequence[int], ends: bool = False) -> None:
        """Append tokens to the text; with ``ends``, what comes next is another text."""
        self._step.extend_suffix(self.handle, tokens, ends)

    def drop(self, count: int) -> int:
        """Forget the oldest places; return how many are left."""
        return self._step.drop_suffix(self.handle, count)

    def draft(self, store: NativeIndex | None, depth: int, nodes: int) -> Followed:
        """Return the best draft behind the text, by it or by ``store``."""
        other = None if store is None else store.handle
        return self._step.draft_suffix(self.handle, other, depth, nodes)
