"""Which index of suffix decoding serves: that in C++, or the one in Python where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..native.choice import library
from ..native.interface import Followed
from ..native.native_suffix import NativeIndex
from .suffix_index import SuffixIndex


class Index(Protocol):
    """A ``SuffixIndex``, in Python or C++; a ``store`` is of the same kind."""

    def extend(self, tokens: Sequence[int], ends: bool = False) -> None: ...
    def drop(self, count: int) -> int: ...
    def draft(self, store: Any, depth: int, nodes: int) -> Followed: ...


def new_index(room: int) -> Index:
    """Return an index of the last ``room`` places of a text, in C++ where there is a library."""
    step = library()
    return SuffixIndex(room) if step is None else NativeIndex(step, room)
