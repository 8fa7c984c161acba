"""The cache of one model, as its owners see it."""

import numpy as np
from numpy.typing import NDArray


class Store:
    """The cache of one model."""

    page_size: int

    @property
    def experts(self) -> int | None:
        """The number of experts that forwards have read, of all layers; None if not counted."""
        return None

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the entries at slots ``sources`` to slots ``targets``, in every layer."""
        raise RuntimeError("this model's cache cannot be rearranged; draft chains only")

    def kept_tokens(self, key: str) -> int:
        """Return after how many tokens, at a page's end, a sequence's states are kept."""
        return 0

    def kept_states(self, key: str) -> NDArray[np.float32]:
        """Return the states of a sequence after its ``kept_tokens``."""
        raise RuntimeError("this model's cache has no states")

    def set_states(self, key: str, states: NDArray[np.float32], tokens: int) -> None:
        """Let a sequence continue after ``tokens`` tokens with the states given."""
        raise RuntimeError("this model's cache has no states")

    def release(self, key: str) -> None:
        """Forget what is kept by ``Segment.key``; pages are given back by their owner."""
