"""The rates expected of drafted nodes before any is seen, as C++ reads them. It needs no torch."""

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ._interface import RATE_BINS, RATE_DEPTHS, RATE_MARGINS, RATE_RANKS, ffi

DEPTHS: int = RATE_DEPTHS
RANKS: int = RATE_RANKS
BINS: int = RATE_BINS
MARGINS: tuple[float, ...] = RATE_MARGINS
"""The beginnings of the margin's bins, after the first."""


class Rates:
    """P(accepted | parent accepted) of nodes, fp32 [``DEPTHS``, ``RANKS``, ``BINS``] of margins.

    Raises ModelError: it has another shape.
    """

    def __init__(self, table: NDArray[np.float32]) -> None:
        if table.shape != (DEPTHS, RANKS, BINS):
            raise ModelError(f"rates of drafts have the shape {table.shape}.")
        self.table = np.ascontiguousarray(table, np.float32)
        self.pointer = ffi.from_buffer("float[]", self.table)


# P(accepted | parent accepted), with a margin of at least 0, 0.5, 1.5 and 3 to the next candidate.
_TABLE = np.empty((DEPTHS, RANKS, BINS), np.float32)
_TABLE[:, 0] = (0.45, 0.7, 0.85, 0.95)
_TABLE[:, 1] = (0.3, 0.15, 0.1, 0.05)
_TABLE[:, 2] = (0.12, 0.06, 0.04, 0.03)
_TABLE[:, 3] = (0.06, 0.04, 0.03, 0.02)
GUESSED = Rates(_TABLE)
"""The rates of a model drafter's nodes until they are counted."""
