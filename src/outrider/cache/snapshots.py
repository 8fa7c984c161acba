"""States of sequences at the ends of pages, for others with the same prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.float32]


class Snapshots:
    """States after the tokens up to a page's end, by the page's key.

    They take up to ``room`` bytes; the least recently used are dropped.
    """

    def __init__(self, room: int) -> None:
        self._room, self.bytes = room, 0
        self._states: OrderedDict[bytes, States] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def longest(self, keys: Sequence[bytes]) -> int:
        """Return the length of the longest prefix of pages with states at its end."""
        found = (n for n in range(len(keys), 0, -1) if keys[n - 1] in self._states)
        return next(found, 0)

    def get(self, key: bytes) -> States:
        """Return the states at a page's end, and mark them as used."""
        self._states.move_to_end(key)
        return self._states[key]

    def put(self, key: bytes, states: States) -> None:
        """Keep the states at a page's end."""
        if key in self._states:
            self._states.move_to_end(key)
            return
        self._states[key] = states
        self.bytes += states.nbytes
        while self.bytes > self._room:
            _, oldest = self._states.popitem(last=False)
            self.bytes -= oldest.nbytes
