"""Bounds on calls before any work on them begins: places in a queue, and memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from .errors import Refusal

MOST_HELD = 256 << 20
"""Most bytes of all bodies together that are being received or read."""
ALWAYS = 1 << 16
"""Bytes that any body may always hold, so that stalled long bodies do not block short ones."""
LOOK_SECONDS = 0.02


@dataclass
class Queue:
    """Sequences and tokens that wait for a first token; until full, it takes calls of any size."""

    most_sequences: int
    most_tokens: int
    sequences: int = 0
    tokens: int = 0

    def enter(self, sequences: int) -> Lease:
        """Return a lease for ``sequences``, which now wait. Raises Refusal: 429."""
        if self.sequences >= self.most_sequences:
            raise Refusal(
                f"{self.sequences} sequences are already waiting, and the limit is "
                f"{self.most_sequences}; try again later.", status=429, code="queue_full",
            )  # fmt: skip
        return Lease(self, sequences)


class Lease:
    """One call's share of a queue; ``close`` gives back what is left of it."""

    def __init__(self, queue: Queue, sequences: int) -> None:
        self._queue = queue
        self._sequences = self._tokens = 0
        self._take(sequences, 0)

    def add_tokens(self, tokens: int) -> None:
        """Add the tokens of the call's prompts, once they are known. Raises Refusal: 429."""
        queue = self._queue
        if queue.tokens >= queue.most_tokens:
            raise Refusal(
                f"requests with {queue.tokens} prompt tokens are already waiting, and the "
                f"limit is {queue.most_tokens}; try again later.", status=429, code="queue_full",
            )  # fmt: skip
        self._take(0, tokens)

    def give_back(self, sequences: int, tokens: int) -> None:
        """Give back sequences and tokens that no longer wait."""
        self._take(-min(sequences, self._sequences), -min(tokens, self._tokens))

    def close(self) -> None:
        """Give back the rest."""
        self._take(-self._sequences, -self._tokens)

    def _take(self, sequences: int, tokens: int) -> None:
        self._sequences += sequences
        self._tokens += tokens
        self._queue.sequences += sequences
        self._queue.tokens += tokens


@dataclass
class BodyRoom:
    """Room for ``most`` bytes of bodies."""

    most: int = MOST_HELD
    held: int = 0


@dataclass
class Held:
    """The bytes that one body holds of a room; ``close`` gives them back."""

    room: BodyRoom
    size: int = 0

    async def add(self, size: int) -> None:
        """Wait for room, and hold ``size`` bytes more."""
        room = self.room
        while self.size + size > ALWAYS and room.held and room.held + size > room.most:
            await asyncio.sleep(LOOK_SECONDS)
        room.held += size
        self.size += size

    def close(self) -> None:
        """Give all held bytes back."""
        self.room.held -= self.size
        self.size = 0
