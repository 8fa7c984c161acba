"""The cache of a native model, and the room for what its calls return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..cache.store import Store
from ..native.checks import Room, free_with
from ..native.library import Library
from .families import Architecture

KNOWN_ROWS = 64
"""Rows of a step up to which the room for its hidden states is kept ready."""


class HiddenRoom(NamedTuple):
    """Room for the hidden states of one call: fp32 [layers, rows, hidden_size], and by layer."""

    whole: torch.Tensor
    by_layer: Mapping[int, torch.Tensor]


class NativeStore(Store):
    """The cache of a native model, addressed by slot = page * page_size + offset.

    Args:
        library: the model's.
        model: its handle; the C side keeps the model for as long as the cache is.
        shape: what the model says of itself.
        num_pages, page_size: of the cache.
    """

    def __init__(
        self, library: Library, model: int, shape: Architecture, num_pages: int, page_size: int
    ) -> None:
        self._library = library
        self._shape = shape
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        self._room = Room(torch.empty(0, shape.vocab_size))
        self._hidden = torch.empty(0)
        self._known: dict[tuple[tuple[int, ...], int], HiddenRoom] = {}
        self.handle = library.new_store(model, num_pages, page_size)
        free_with(self, library.free, "store", self.handle)

    @property
    def any_harmed(self) -> bool:
        """True if a slot's row was not finite."""
        return self._library.num_harmed(self.handle) > 0

    def room(self, rows: int) -> Room:
        """Return room for the logits of one call, at least ``rows``; the next writes them anew."""
        if self._room.rows < rows:
            self._room = Room(torch.empty(rows, self._room.width))
        return self._room

    def hidden_room(self, layers: Sequence[int], rows: int) -> HiddenRoom:
        """Return room for the states of one call behind some layers, see ``room``."""
        key = (*layers,), rows
        found = self._known.get(key)
        if found is None:  # a view takes torch longer than a small model a layer
            shape = len(layers), rows, self._shape.hidden_size
            size = math.prod(shape)
            if len(self._hidden) < size:
                self._hidden = torch.empty(size)
                self._known.clear()
            whole = self._hidden[:size].view(shape)
            found = HiddenRoom(whole, dict(zip(layers, whole, strict=True)))
            if rows <= KNOWN_ROWS:
                self._known[key] = found
        return found

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the entries at ``sources`` to ``targets`` (slots), in every layer."""
        self._library.move(self.handle, sources, targets)
