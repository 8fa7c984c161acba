"""The target's states that a head has not read yet, in a ring of bounded size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.trees import num_alike
from ..base.types import SequenceState


class RingRun(NamedTuple):
    """States of ``length`` tokens from position ``start`` on; ``number`` were written before."""

    start: int
    number: int
    length: int


@dataclass
class StateRing:
    """Up to ``room`` states by sequence and position; when full, the oldest are overwritten."""

    room: int
    width: int
    written: int = 0
    states: NDArray[np.float32] = field(init=False)
    _runs: dict[str, list[RingRun]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = np.zeros((self.room, self.width), np.float32)

    def append(self, sequence: str, start: int, count: int) -> array[int]:
        """Return where to write states of ``count`` tokens, the last ones of a sequence so far."""
        runs = self._runs.setdefault(sequence, [])
        while runs and runs[-1].start >= start:  # computed anew
            runs.pop()
        if runs and runs[-1].start + runs[-1].length > start:
            runs[-1] = runs[-1]._replace(length=start - runs[-1].start)
        while runs and runs[0].number + runs[0].length <= self.written - self.room:
            del runs[0]
        last = runs[-1] if runs else None
        if last and last.start + last.length == start and last.number + last.length == self.written:
            runs[-1] = last._replace(length=last.length + count)
        else:
            runs.append(RingRun(start, self.written, count))
        first = self.written
        self.written += count
        return array("i", [number % self.room for number in range(first, first + count)])

    def first_known(self, sequence: str, stop: int) -> int:
        """Return the first position from which all states before ``stop`` are held."""
        first, gone = stop, self.written - self.room
        for start, number, length in reversed(self._runs.get(sequence, [])):
            if start + length < first:
                break
            first = min(first, start + min(max(0, gone - number), length))
            if gone > number:
                break
        return first

    def read(self, sequence: str, start: int, stop: int) -> NDArray[np.float32]:
        """Return the states of positions ``start`` to ``stop``, all known: fp32 [., width].

        If they lie together they are a view, valid until the next ones are written.
        """
        parts: list[NDArray[np.float32]] = []
        for first, number, length in self._runs.get(sequence, []):
            low, high = max(first, start), min(first + length, stop)
            if low < high:
                begin = (number + low - first) % self.room
                end = begin + high - low
                parts.append(self.states[begin:end])
                if end > self.room:
                    parts.append(self.states[: end - self.room])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self.states[:0]])

    def forget(self, sequence: str, before: int) -> None:
        """Forget the states of a sequence before a position."""
        runs = self._runs.get(sequence, [])
        while runs and runs[0].start + runs[0].length <= before:
            del runs[0]

    def release(self, sequence: str) -> None:
        """Forget a sequence."""
        self._runs.pop(sequence, None)


@dataclass
class Waiting:
    """Tokens of a sequence from position ``start`` on whose states are not made yet.

    ``hidden`` are hidden states of the target, fp32 [layers, any rows, width]. A head reads their
    layers ``order``; the tokens' rows are ``rows``. ``ends`` has by page the index of the token
    that ends it. ``number`` is that of a ``HiddenRoom``, None for a copy.
    """

    hidden: NDArray[np.float32]
    order: Sequence[int]
    rows: list[int]
    start: int
    ends: dict[int, int]
    number: int | None

    def copied(self) -> Waiting:
        """Return the same tokens with a copy of their hidden states."""
        own = np.stack([self.hidden[i].take(self.rows, 0) for i in self.order])
        order, rows = range(len(own)), [*range(len(self.rows))]
        return Waiting(own, order, rows, self.start, self.ends, None)

    def goes_on(self, hidden: NDArray[np.float32], start: int) -> bool:
        """Return True where rows of ``hidden`` from position ``start`` on follow, in one place."""
        return hidden is self.hidden and start == self.start + len(self.rows)

    def add(self, rows: list[int], ends: dict[int, int]) -> None:
        """Take in rows that follow."""
        count = len(self.rows)
        self.rows += rows
        for page, at in ends.items():
            self.ends[page] = count + at


class PageNotes:
    """The keys of the complete pages in a drafter's cache, by the target's page ids."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._keys: dict[int, bytes] = {}

    def num_whole(self, sequence: SequenceState) -> int:
        """Return how many pages at a sequence's beginning others have computed.

        The last token is always computed.
        """
        pages = (len(sequence.tokens) - 1) // self.page_size
        return num_alike(map(self._keys.get, sequence.pages[:pages]), sequence.keys)

    def overwrite(self, sequence: SequenceState, start: int) -> None:
        """Forget the pages that are written from a position on."""
        for page in sequence.pages[start // self.page_size :]:
            self._keys.pop(page, None)

    def note(self, sequence: SequenceState, noted: int, num_computed: int) -> int:
        """Note complete pages from the ``noted``-th on; return how many are noted then.

        A sequence that ended has given its pages back.
        """
        full = min(num_computed // self.page_size, len(sequence.keys), len(sequence.pages))
        for page in range(noted, full):
            self._keys[sequence.pages[page]] = sequence.keys[page]
        return max(noted, full)
