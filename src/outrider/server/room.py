"""A bound on the memory of all bodies that are being received."""

from __future__ import annotations

import asyncio

MOST_HELD = 256 << 20
"""Bytes of all bodies that are being received or read."""
ALWAYS = 1 << 16
"""Bytes that every body may hold at once, so that long ones that stall hold up no short ones."""
LOOK_SECONDS = 0.02


class Room:
    """Room for ``most`` bytes of bodies."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self.most = most
        self.held = 0


class Held:
    """The bytes that one body holds of a room; ``close`` gives them back."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._size = 0

    async def add(self, size: int) -> None:
        """Wait for room, and hold ``size`` bytes more."""
        room = self._room
        while self._size + size > ALWAYS and room.held and room.held + size > room.most:
            await asyncio.sleep(LOOK_SECONDS)
        room.held += size
        self._size += size

    def close(self) -> None:
        """Give all held bytes back."""
        self._room.held -= self._size
        self._size = 0
