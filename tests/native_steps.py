"""The native libraries that can be tried here."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.native import choice as native
from outrider.native.library import Library

HERE = native.ISAS[: native._level() + 1]
"""The instruction sets that this CPU runs, the best one last."""


def native_noise(
    step: Library, seed: int, position: int, sample: int, count: int
) -> NDArray[np.float32]:
    """The noise of ids below ``count`` at a position, by C++."""
    out = np.empty(count, np.float32)
    step._run(step._c.outrider_noise, seed, position, sample, count, out.ctypes.data)
    return out


def step(isa: str) -> Library:
    found = native.open_library(isa)
    assert found is not None
    if found.isa != isa:
        pytest.skip(f"{isa} was not built")
    return found
