"""The queue of a server: its calls enter before anything of them is computed, and count at once."""

from __future__ import annotations

from .errors import ServerError


class Queue:
    """Sequences and prompt tokens that wait for a first token.

    Args:
        most_sequences, most_tokens: that may wait; a queue that is not full takes a whole call.
    """

    def __init__(self, most_sequences: int, most_tokens: int) -> None:
        self.most_sequences = most_sequences
        self.most_tokens = most_tokens
        self.sequences = 0
        self.tokens = 0

    def enter(self, sequences: int) -> Lease:
        """Let so many sequences wait, and return their lease.

        Raises:
            ServerError: 429, too many wait already.
        """
        if self.sequences >= self.most_sequences:
            raise ServerError(
                429, f"{self.sequences} sequences wait already, and the queue holds "
                f"{self.most_sequences}; try again later.", code="queue_full",
            )  # fmt: skip
        return Lease(self, sequences)


class Lease:
    """The share that one call has in a queue; ``leave`` gives back all that is left of it."""

    def __init__(self, queue: Queue, sequences: int) -> None:
        self._queue = queue
        self._sequences = self._tokens = 0
        self._take(sequences, 0)

    def add_tokens(self, tokens: int) -> None:
        """Let the call's prompts wait, as soon as their length is known.

        Raises:
            ServerError: 429, too many tokens wait already.
        """
        queue = self._queue
        if queue.tokens >= queue.most_tokens:
            raise ServerError(
                429, f"requests of {queue.tokens} prompt tokens wait already, and the "
                f"limit is {queue.most_tokens}; try again later.", code="queue_full",
            )  # fmt: skip
        self._take(0, tokens)

    def give_back(self, sequences: int, tokens: int) -> None:
        """Give back so many, which do not wait any more."""
        self._take(-min(sequences, self._sequences), -min(tokens, self._tokens))

    def leave(self) -> None:
        """Give back all that is left."""
        self._take(-self._sequences, -self._tokens)

    def _take(self, sequences: int, tokens: int) -> None:
        self._sequences += sequences
        self._tokens += tokens
        self._queue.sequences += sequences
        self._queue.tokens += tokens
