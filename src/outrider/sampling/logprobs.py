"""Log probabilities of tokens, for requests that want them."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..base.types import Logprob, Logprobs
from .arrays import highest, log_sum_exp

Measured = tuple[list[float], list[int], list[list[int]], list[list[float]]]
"""By row: log probability and rank of its token; the likeliest ids and their values."""
Measure = Callable[[NDArray[np.float32], Sequence[int], Sequence[int], int], Measured]
"""``measure``, or the native step's."""


def measure(
    z: NDArray[np.float32], rows: Sequence[int], tokens: Sequence[int], count: int
) -> Measured:
    """Return the figures of ``tokens`` under ``rows`` of z, see ``logprobs``."""
    z = z[list(rows)]
    whole = log_sum_exp(z)
    chosen = np.take_along_axis(z, np.array(tokens, np.int64)[:, None], 1)
    ranks = (z > chosen).sum(-1) + 1
    ids = highest(z, min(count, z.shape[1]))
    values = np.take_along_axis(z, ids, 1) - whole
    return (chosen - whole)[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist()


def logprobs(
    z: NDArray[np.float32],
    rows: Sequence[int],
    tokens: Sequence[int],
    count: int,
    measure: Measure = measure,
) -> list[Logprobs]:
    """Return log probabilities by token id for each row: its token first, then ``count`` likeliest.

    ``tokens`` are those of ``rows`` of z, fp32 [any, vocabulary], raw or processed logits.
    ``measure`` computes the figures. Ranks count from 1, as vLLM's do.
    """
    measured = measure(z, rows, tokens, count)
    by_row = []
    for token, own, own_rank, ids, values in zip(tokens, *measured, strict=True):
        of_row = {token: Logprob(own, own_rank)}
        for rank, (id, value) in enumerate(zip(ids, values, strict=True), 1):
            of_row.setdefault(id, Logprob(value, rank))
        by_row.append(of_row)
    return by_row
