"""The cache of one model, as its owners see it."""

import numpy as np
from numpy.typing import NDArray


class Store:
    """The cache of one model."""

    page_size: int

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the entries at slots ``sources`` to slots ``targets``, in every layer."""
        raise RuntimeError("this model's cache cannot be rearranged; draft chains only")

    def kept_states(self, key: str) -> tuple[NDArray[np.float32], int]:
        """Return a sequence's states at the end of its last full page, and how many tokens that is.

        0 tokens stand for no states.
        """
        return np.empty(0, np.float32), 0

    def set_states(self, key: str, states: NDArray[np.float32], tokens: int) -> None:
        """Let a sequence go on behind so many tokens, whose states these are."""
        raise RuntimeError("this model's cache has no states")

    def release(self, key: str) -> None:
        """Forget what is kept by ``Segment.key``; pages are given back by their owner."""
