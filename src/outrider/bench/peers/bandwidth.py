"""How fast this machine reads memory, measured between the rounds: what bounds plain decoding."""

from __future__ import annotations

import time

import numpy as np

from ...native.choice import library

SIZE = 1 << 30
"""Bytes: more than caches keep from one pass to the next."""
PASSES = 5


def read_bandwidth() -> float | None:
    """Bytes a second that the native step's threads read, at best; None where there is no step.

    The fastest of ``PASSES`` over memory that is given back.
    """
    found = library()
    if found is None:
        return None
    memory, seconds = np.ones(SIZE, np.uint8), []
    for _ in range(PASSES):
        begin = time.perf_counter()
        found.read(memory)
        seconds.append(time.perf_counter() - begin)
    return SIZE / min(seconds)
