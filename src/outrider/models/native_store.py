"""The cache of a native model, and the room for what its calls return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from ..cache.store import Store
from ..checkpoints.architecture import Architecture
from ..errors import ModelError
from ..native.checks import LayerRoom, Room, free_with
from ..native.library import Library
from .rows import Segment

HIDDEN_ROWS = 512
"""Rows of the ring of room for hidden states."""
FEW_ROWS = 64
"""Most rows of a step whose states go to the ring; larger steps have room of their own."""
LASTING_ROWS = HIDDEN_ROWS - 2 * FEW_ROWS
"""Rows of later such steps during which states in the ring stay valid."""


class HiddenRoom(Mapping[int, NDArray[np.float32]]):
    """The hidden states of one call, by layer fp32 [rows, hidden_size].

    They are the rows ``first`` to ``first + count`` of ``room``. ``number`` counts all rows that
    were given room before them; None means that the next call overwrites them. Otherwise they
    stay until ``LASTING_ROWS`` more rows have been given room.
    """

    def __init__(self, room: LayerRoom, first: int, count: int, number: int | None) -> None:
        self.room, self.first, self.count, self.number = room, first, count, number

    def __getitem__(self, layer: int) -> NDArray[np.float32]:
        """Return a view."""
        if layer not in self.room.layers:
            raise KeyError(layer)
        states: NDArray[np.float32] = self.room.array[self.room.layers.index(layer)]
        return states[self.first : self.first + self.count]

    def __iter__(self) -> Iterator[int]:
        return iter(self.room.layers)

    def __len__(self) -> int:
        return len(self.room.layers)


class NativeStore(Store):
    """The cache of a native model, addressed by slot = page * page_size + offset.

    The C side keeps the model of that handle alive as long as the cache.
    """

    def __init__(
        self, library: Library, model: int, shape: Architecture, num_pages: int, page_size: int
    ) -> None:
        self._library = library
        self._shape = shape
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        self._room = Room(np.empty((0, shape.vocab_size), np.float32))
        self._hidden: dict[tuple[tuple[int, ...], bool], LayerRoom] = {}
        self._first = self._given = 0
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self.handle = library.new_store(model, num_pages, page_size)
        free_with(self, library.free, "store", self.handle)

    @property
    def any_harmed(self) -> bool:
        """True if a slot's row was not finite."""
        return self._library.num_nonfinite(self.handle) > 0

    @property
    def experts(self) -> int:
        """See ``Store``."""
        return self._library.experts_read(self.handle)

    def room(self, rows: int) -> Room:
        """Return room for the logits of one call, at least ``rows``; the next writes them anew."""
        if self._room.rows < rows:
            self._room = Room(np.empty((rows, self._room.width), np.float32))
        return self._room

    def hidden_room(self, layers: Sequence[int], rows: int) -> HiddenRoom:
        """Return room for the hidden states of one call after some layers."""
        few = rows <= FEW_ROWS
        key = (*layers,), few
        room = self._hidden.get(key)
        if room is None or (room.rows < rows and not few):
            shape = len(layers), HIDDEN_ROWS if few else rows, self._shape.hidden_size
            room = self._hidden[key] = LayerRoom(np.empty(shape, np.float32), layers)
        if not few:
            return HiddenRoom(room, 0, rows, None)
        if self._first + rows > HIDDEN_ROWS:
            self._given += HIDDEN_ROWS - self._first
            self._first = 0
        given = HiddenRoom(room, self._first, rows, self._given)
        self._first += rows
        self._given += rows
        return given

    def slots(self, segments: Sequence[Segment]) -> Iterable[int]:
        """Return the slot of each sequence's states; 0 for all if layers have none.

        Raises ModelError if a sequence that is past its beginning is not known here.
        """
        if not self._shape.stateful:
            return repeat(0)
        return [self._slot(segment.key, segment.start) for segment in segments]

    def _slot(self, key: str, start: int) -> int:
        slot = self._slots.get(key)
        if slot is None:
            if start:
                raise ModelError(f"sequence {key!r} goes on at {start}, but has no states here.")
            slot = self._slots[key] = self._free.pop() if self._free else len(self._slots)
        return slot

    def kept_tokens(self, key: str) -> int:
        slot = self._slots.get(key)
        if slot is None:
            return 0
        return self._library.kept_tokens(self.handle, slot, self._shape.state_size(0))

    def kept_states(self, key: str) -> NDArray[np.float32]:
        slot = self._slots[key]
        return self._library.kept_states(self.handle, slot, self._shape.state_size(0))

    def set_states(self, key: str, states: NDArray[np.float32], tokens: int) -> None:
        self._library.set_states(self.handle, self._slot(key, 0), states, tokens)

    def release(self, key: str) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the entries at ``sources`` to ``targets`` (slots), in every layer."""
        self._library.move(self.handle, sources, targets)
