"""The index of suffix decoding in Python: the reference of native/src/suffix.cpp.

Oliaro et al., "SuffixDecoding" (2024), by the rule of ArcticInference: a match of L tokens drafts
L tokens at most, each by a path of a probability that is not too low, and the match counts whose
draft has the highest sum of probabilities.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count as numbers

from ..native.interface import SUFFIX_DEPTH, Followed

LEAST = 0.1
"""Probability of a drafted path, at least."""
BREAK = -1
"""Stands before a text, and between two."""

Match = tuple["_Node", int]
"""A node whose contexts, up to this length, are tails of a text."""


class _Node:
    """Places that end in the same tokens: the newest, how many they are, and what followed them.

    ``length`` is that of the longest context that they share.
    """

    __slots__ = ("children", "count", "length", "next", "place")

    def __init__(self, place: int, length: int, count: int, next: dict[int, int]) -> None:
        self.place, self.length, self.count, self.next = place, length, count, next
        self.children: dict[int, _Node] = {}


class SuffixIndex:
    """A trie of the contexts of a text's last places, read backwards.

    Contexts with the same places are one node. So a place enters and leaves by one walk, and all
    matches of a tail lie on one.

    Args:
        room: how many places it holds; the end of a text is a place of its own.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._root = _Node(0, 0, 0, {})
        self._text = [BREAK]
        self._base, self._first = 0, 1  # where the kept text begins, and the oldest place

    def extend(self, tokens: Sequence[int], ends: bool = False) -> None:
        """Append tokens to the text; with ``ends``, what comes next is another text."""
        for token in tokens:
            self._append(token)
        if ends:
            self._append(BREAK)

    def drop(self, count: int) -> int:
        """Forget the oldest places; return how many are left."""
        for place in range(self._first, min(self._first + count, self._end)):
            self._remove(place)
            self._first += 1
        unused = self._first - SUFFIX_DEPTH - self._base
        if 2 * unused > len(self._text):
            del self._text[:unused]
            self._base += unused
        return self._end - self._first

    def draft(self, store: SuffixIndex | None, depth: int, nodes: int) -> Followed:
        """Return the best draft behind the text, by it or by ``store``.

        Args:
            store: an index of other texts.
            depth: longest chain.
            nodes: most nodes; more than ``depth`` make a tree.
        """
        tail = self._context(self._end - 1)
        if tail[0] == BREAK:
            del tail[0]
        best, score = Followed([], [], [], []), 0.0
        for index in (self, store):
            if index is not None:
                drafting = _Drafting(index, tail, depth, nodes)
                for _, length in reversed(index.find(tail)):
                    if min(nodes, length) <= score:  # a match drafts no more tokens than it has
                        break
                    found, promised = drafting.draft(length)
                    if promised > score:
                        best, score = found, promised
        return best

    def find(self, tail: Sequence[int]) -> list[Match]:
        """Return the matches of a tail, shortest first."""
        found: list[Match] = []
        node, length = self._root, 0
        while length < len(tail) and length == node.length:
            below = node.children.get(tail[-1 - length])
            if below is None:
                break
            node, length = below, length + 1
            most = min(len(tail), node.length)
            while length < most and self._at(node.place - length) == tail[-1 - length]:
                length += 1
            found.append((node, length))
        return found

    @property
    def _end(self) -> int:
        return self._base + len(self._text)

    def _at(self, place: int) -> int:
        return self._text[place - self._base]

    def _context(self, place: int) -> list[int]:
        """Return the last tokens up to a place: as many as a context has, or from the break on."""
        begin = place - self._base
        while self._text[begin] != BREAK and place - self._base - begin + 1 < SUFFIX_DEPTH:
            begin -= 1
        return self._text[begin : place - self._base + 1]

    def _append(self, token: int) -> None:
        last = self._end - 1
        if token != BREAK and last >= self._first:
            for node in self._path(last):
                node.next[token] = node.next.get(token, 0) + 1
        self._text.append(token)
        if self._end - self._first > self._room:
            self.drop(1)
        if token != BREAK:
            self._insert(last + 1)

    def _path(self, place: int) -> Iterator[_Node]:
        """Yield the nodes of a place, the shortest context first; the end of a text has none."""
        node = self._root
        while node.children and self._at(place) != BREAK:
            node = node.children[self._at(place - node.length)]
            yield node

    def _insert(self, place: int) -> None:
        # Contexts end with a break or at their full length: none is the beginning of another.
        context, above = self._context(place), self._root
        for node, length in self.find(context):
            if length < node.length:
                upper = _Node(node.place, length, node.count, dict(node.next))
                upper.children[self._at(node.place - length)] = node
                above.children[context[-1 - above.length]] = node = upper
            node.count += 1
            node.place = place
            above = node
        if above.length < len(context):
            leaf = _Node(place, len(context), 1, {})
            above.children[context[-1 - above.length]] = leaf

    def _remove(self, place: int) -> None:
        """Take the oldest place out."""
        path = [self._root, *self._path(place)]
        token = self._at(place + 1) if place + 1 < self._end else BREAK
        for node in path[1:]:
            node.count -= 1
            if token != BREAK:
                node.next[token] -= 1
                if not node.next[token]:
                    del node.next[token]
        if len(path) == 1 or path[-1].count:
            return
        parent = path[-2]
        del parent.children[self._at(place - parent.length)]
        if parent is not self._root and len(parent.children) == 1:
            (only,) = parent.children.values()
            path[-3].children[self._at(only.place - path[-3].length)] = only


class _Drafting:
    """Drafts behind a tail by one index.

    They are chains of the most frequent tokens, or trees of the likeliest where there may be more
    nodes than levels.
    """

    def __init__(self, index: SuffixIndex, tail: Sequence[int], depth: int, most: int) -> None:
        self._index, self._depth, self._most = index, depth, most
        self._tail = tuple(tail)
        self._known: dict[tuple[int, ...], list[Match]] = {}

    def draft(self, length: int) -> tuple[Followed, float]:
        """Return the draft of a match of that length, and how many of its tokens should stand."""
        made, score = Followed([], [], [], []), 0.0
        number = numbers()
        open: list[tuple[float, int, int, tuple[int, ...], int, int]] = []

        def add_children(parent: int, path: tuple[int, ...], p: float) -> None:
            for token, count, rest, places in self._next(path, length, p):
                item = (-(p * count / places), next(number), parent, (*path, token), count, rest)
                heapq.heappush(open, item)

        add_children(-1, (), 1.0)
        while open and len(made.tokens) < min(self._most, length):
            less, _, parent, path, count, rest = heapq.heappop(open)
            for column, value in zip(made, (path[-1], parent, count, rest), strict=True):
                column.append(value)
            score -= less
            if len(path) < self._depth:
                add_children(len(made.tokens) - 1, path, -less)
        return made, score

    def _next(
        self, path: tuple[int, ...], length: int, p: float
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield tokens behind a drafted path, the most frequent first.

        Beside each: how often it followed, how often others did, and how many places there are.
        """
        matches = self._matches(path)
        wanted = min(length + len(path), SUFFIX_DEPTH)
        at = bisect_left(matches, wanted, key=lambda match: match[1])
        if at == len(matches):
            return
        node = matches[at][0]
        all = sum(node.next.values())
        likely = [(-n, token) for token, n in node.next.items() if p * n / node.count >= LEAST]
        for less, token in sorted(likely)[: None if self._most > self._depth else 1]:
            yield token, -less, all + less, node.count

    def _matches(self, path: tuple[int, ...]) -> list[Match]:
        if path not in self._known:
            self._known[path] = self._index.find((*self._tail, *path)[-SUFFIX_DEPTH:])
        return self._known[path]
