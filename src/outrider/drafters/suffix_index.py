"""The index of suffix decoding: in C++, or in Python where there is no library.

Oliaro et al., "SuffixDecoding" (2024), by the rule of ArcticInference: a match of L tokens drafts
L tokens at most, each on a path of at least ``LEAST`` probability. The match whose draft has the
highest sum of probabilities is used.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import count as numbers
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..native._interface import ffi
from ..native.checks import free_with
from ..native.choice import library
from ..native.interface import SUFFIX_DEPTH, Followed
from ..native.library import Library, at

LEAST = 0.1
"""Least probability of a drafted path."""
BREAK = -1
"""Marks the beginning of a text, and the place between two."""

Places = NDArray[np.int64]


class SuffixIndex:
    """The last places of a text; each draft looks at all of them. The reference of suffix.cpp.

    Args:
        room: how many places it holds; the end of a text is a place of its own.
    """

    def __init__(self, room: int) -> None:
        self._room, self._text = room, array("i", [BREAK])
        self._first = 1  # the oldest place

    def extend(self, tokens: Sequence[int], ends: bool = False) -> None:
        """Append tokens to the text; with ``ends``, what comes next is another text."""
        self._text.extend(tokens)
        if ends:
            self._text.append(BREAK)
        self.drop(len(self._text) - self._first - self._room)

    def drop(self, count: int) -> int:
        """Forget the oldest places; return how many are left."""
        self._first = min(self._first + max(0, count), len(self._text))
        unused = self._first - SUFFIX_DEPTH
        if 2 * unused > len(self._text):
            del self._text[:unused]
            self._first = SUFFIX_DEPTH
        return len(self._text) - self._first

    def draft(self, store: Any, depth: int, nodes: int) -> Followed:
        """Return the best draft after the text, from it or from ``store``.

        Args:
            store: an index of other texts, of the same kind; None for none.
            depth: longest chain.
            nodes: most nodes; more than ``depth`` make a tree.
        """
        tail = [*takewhile(lambda token: token != BREAK, reversed(self._text[-SUFFIX_DEPTH:]))]
        best, score = Followed([], [], [], []), 0.0
        for index in (self, store):
            if index is None or not tail:
                continue
            matches = _Matches(index, tail, depth, nodes)
            for length in matches.lengths:
                if min(nodes, length) <= score:  # a match drafts no more tokens than it has
                    break
                draft, promised = matches.draft(length)
                if promised > score:
                    best, score = draft, promised
        return best


class _Matches:
    """The places in an index of the last token of ``tail``, which has the newest token first.

    Drafts are chains of the most frequent tokens, or trees of the likeliest where there may be more
    nodes than levels.
    """

    def __init__(self, index: SuffixIndex, tail: Sequence[int], depth: int, most: int) -> None:
        begin = max(0, index._first - SUFFIX_DEPTH)
        self._depth, self._most, self._first = depth, most, index._first - begin + SUFFIX_DEPTH
        self._text = np.pad(index._text[begin:], SUFFIX_DEPTH, constant_values=BREAK)
        # Places before the first one count too: drafted paths may lead from them to later ones.
        self._places = np.flatnonzero(self._text == tail[0])
        self._alike = np.ones(len(self._places), np.int64)  # tokens up to them that are the tail's
        at = np.arange(len(self._places))
        for length, token in enumerate(tail[1:], 1):
            at = at[self._text[self._places[at] - length] == token]
            if not len(at):
                break
            self._alike[at] += 1
        lengths = np.unique(self._alike[self._places >= self._first])
        self.lengths: list[int] = lengths[::-1].tolist()
        """Lengths of the matches, longest first; tails at the same places count as the longest."""

    def draft(self, length: int) -> tuple[Followed, float]:
        """Return the draft of a match of that length, and its expected number of right tokens."""
        made, score, number = Followed([], [], [], []), 0.0, numbers()
        open: list[tuple[float, int, int, int, Places, int, int, int]] = []

        def add_children(parent: int, level: int, at: Places, p: float) -> None:
            # Contexts have ``SUFFIX_DEPTH`` tokens at most, drafted ones included.
            near = at[self._alike[at] >= min(length, SUFFIX_DEPTH - level)]
            near = near[self._places[near] + level >= self._first]
            behind = self._text[self._places[near] + level + 1]
            columns = np.unique(behind[behind != BREAK], return_counts=True)
            ranked = sorted(zip(*(each.tolist() for each in columns), strict=True), key=_rank)
            total = sum(count for _, count in ranked)
            for token, count in ranked[: None if self._most > self._depth else 1]:
                likely = p * count / len(near)
                if likely >= LEAST:
                    rest = total - count
                    item = -likely, next(number), parent, level + 1, at, token, count, rest
                    heapq.heappush(open, item)

        add_children(-1, 0, np.arange(len(self._places)), 1.0)
        while open and len(made.tokens) < min(self._most, length):
            less, _, parent, level, at, token, count, rest = heapq.heappop(open)
            for column, value in zip(made, (token, parent, count, rest), strict=True):
                column.append(value)
            score -= less
            if level < self._depth:
                at = at[self._text[self._places[at] + level] == token]
                add_children(len(made.tokens) - 1, level, at, -less)
        return made, score


def _rank(followed: tuple[int, int]) -> tuple[int, int]:
    """Return the key by which the most frequent token comes first, of equal ones the lowest."""
    token, count = followed
    return -count, token


class NativeIndex:
    """``SuffixIndex`` in C++, with the same results."""

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
        """Return the best draft after the text, from it or from ``store``."""
        out = ffi.new("int32_t[]", 4 * SUFFIX_DEPTH)
        indices = at(self._handle), at(None if store is None else store._handle)
        count = self._step.made("int64_t", "suffix_draft", *indices, depth, nodes, out)
        rows = range(0, 4 * SUFFIX_DEPTH, SUFFIX_DEPTH)
        return Followed(*(ffi.unpack(out + row, count) for row in rows))


Index = SuffixIndex | NativeIndex


def new_index(room: int) -> Index:
    """Return an index of the last ``room`` places of a text, in C++ where there is a library."""
    step = library()
    return SuffixIndex(room) if step is None else NativeIndex(step, room)
