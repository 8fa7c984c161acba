"""The index of suffix decoding in C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._interface import SUFFIX_DEPTH, ffi
from .checks import free_with
from .interface import Followed
from .library import Library, at


class NativeIndex:
    """``drafters.suffix_index.SuffixIndex`` in C++, with the same results."""

    def __init__(self, step: Library, room: int) -> None:
        self._step, self._handle = step, step.made("SuffixIndex *", "suffix", room)
        free_with(self, step.free, "suffix", self._handle)

    def extend(self, tokens: Sequence[int], ends: bool = False) -> None:
        """Append tokens to the text; with ``ends``, what comes next is another text."""
        self._step.run("suffix_extend", at(self._handle), [*tokens], len(tokens), ends)

    def drop(self, count: int) -> int:
        """Forget the oldest places; return how many are left."""
        return self._step.made("int64_t", "suffix_drop", at(self._handle), count)

    def draft(self, store: Any, depth: int, nodes: int) -> Followed:
        """Return the best draft behind the text, by it or by ``store``."""
        out = ffi.new("int32_t[]", 4 * SUFFIX_DEPTH)
        indices = at(self._handle), at(None if store is None else store._handle)
        count = self._step.made("int64_t", "suffix_draft", *indices, depth, nodes, out)
        rows = range(0, 4 * SUFFIX_DEPTH, SUFFIX_DEPTH)
        return Followed(*(ffi.unpack(out + row, count) for row in rows))
