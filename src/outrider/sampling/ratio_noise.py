"""The ratio rules' own noise: never the shared noise, and no draw is used twice.

The Philox words of ``noise``, each use in a stream of its own:

    stream = kind + 4 * (base + 1)      kind 0 the drafter, 1 acceptance, 2 the token after a draft

``base`` is how many tokens were committed when the step began; each step has another one. A
position whose draft was rejected is drafted again in the next step, and block verification also
depends on the tokens drafted after it: a reused draw would bias the second decision. Stream 0
(shared) is below these streams, 2^32 - 1 (seeds) is above.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..base.types import Row
from .noise import gumbel, words
from .shared_noise import Noise

DRAFTING, ACCEPTING, ENDING = range(3)
LARGEST_BASE = 2**30 - 3  # largest base whose streams stay below SEED_STREAM


def streams(kind: int, rows: Sequence[Row]) -> list[int]:
    """Return the stream of each row; ValueError if a base is out of range."""
    for row in rows:
        if not 0 <= row.base <= LARGEST_BASE:
            raise ValueError(f"base must be from 0 to {LARGEST_BASE}, got {row.base}")
    return [kind + 4 * (row.base + 1) for row in rows]


class FreshNoise(Noise):
    """Gumbel noise keyed by seed, sample, position, base and ``kind``; nothing is kept."""

    def __init__(self, vocab_size: int, kind: int) -> None:
        self.vocab_size, self.kind = vocab_size, kind

    def of(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        return gumbel(*_keys(rows), self.vocab_size, streams(self.kind, rows))


def uniforms(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Return a uniform of each row: fp64 [rows], (k + 0.5) / 2^32 of id 0's word k."""
    k = words(*_keys(rows), 1, streams(ACCEPTING, rows))[:, 0]
    return (k.astype(np.float64) + 0.5) * 2.0**-32


def _keys(rows: Sequence[Row]) -> tuple[list[int], list[int], list[int]]:
    """Return seeds, sample indices and positions."""
    return [r.seed for r in rows], [r.sample_index for r in rows], [r.position for r in rows]
