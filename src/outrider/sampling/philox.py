"""Philox4x32-10, the counter-based generator of all noise and seeds.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

WORD = 2**32 - 1  # a word with all bits set
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85

Words = Any
"""A uint64 array of NumPy, or an int64 tensor of torch, whose operators wrap alike."""


def rounds(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Return Philox4x32-10 of broadcastable words.

    Between rounds only the low halves of c1 and c3 are valid: a mask is needed only before a word
    is multiplied.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(10):
        if number < 4:
            # Words that do not vary along an axis stay small here; after four rounds every word
            # depends on all inputs, so it is a fresh array of the full shape.
            low0, low1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
            c0 = ((low1 >> 32) ^ (c1 ^ k0)) & WORD
            c2 = ((low0 >> 32) ^ (c3 ^ k1)) & WORD
            c1, c3 = low1, low0
        else:
            c2 *= _MULTIPLIER_1
            c1 ^= k0
            c1 ^= c2 >> 32
            c1 &= WORD
            c0 *= _MULTIPLIER_0
            c3 ^= k1
            c3 ^= c0 >> 32
            c3 &= WORD
            c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = (k0 + _WEYL_0) & WORD, (k1 + _WEYL_1) & WORD
    c1 &= WORD
    c3 &= WORD
    return c0, c1, c2, c3


def philox(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[ArrayLike, ArrayLike]
) -> tuple[NDArray[np.uint32], ...]:
    """Return Philox4x32-10 of any counter and key: four uint32 arrays of the broadcast shape.

    Words are in [0, 2^32), the low one of the key first.
    """
    words = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in (*counter, *key)))
    c0, c1, c2, c3, k0, k1 = words
    return tuple(word.astype(np.uint32) for word in rounds((c0, c1, c2, c3), (k0, k1)))


def check(name: str, value: int, bits: int) -> int:
    """Return ``value``; ValueError unless it is at least 0 and below 2**bits."""
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} must be at least 0 and below 2^{bits}, got {value}")
    return value
