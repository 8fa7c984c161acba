"""Log probabilities of tokens, for requests that want them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.types import Logprob, Logprobs
from .arrays import highest, log_sum_exp

ALL = -1


class Asked(NamedTuple):
    """The log probabilities that are wanted: of one token per row, and of the ``likeliest``.

    ``likeliest`` is how many; ``ALL`` stands for the whole vocabulary.

    ``tokens`` has one for each of ``rows`` of z, fp32 [any, vocabulary], raw or processed logits.
    """

    z: NDArray[np.float32]
    rows: Sequence[int]
    tokens: Sequence[int]
    likeliest: int


Measured = tuple[float, int, list[int], list[float]]
"""Of a row: log probability and rank of its token; the likeliest ids and their values."""
Measure = Callable[[Sequence[Asked]], list[Measured]]
"""``measure``, or the native step's."""


def measure(asked: Sequence[Asked]) -> list[Measured]:
    """Return the figures of all rows, one after the other. Ranks count from 1, as vLLM's do."""
    return [row for each in asked for row in _measured(*each)]


def _measured(
    z: NDArray[np.float32], rows: Sequence[int], tokens: Sequence[int], count: int
) -> list[Measured]:
    z = z[list(rows)]
    whole = log_sum_exp(z)
    chosen = np.take_along_axis(z, np.array(tokens, np.int64)[:, None], 1)
    ranks = (z > chosen).sum(-1) + 1
    ids = highest(z, z.shape[1] if count == ALL else min(count, z.shape[1]))
    values = np.take_along_axis(z, ids, 1) - whole
    own = (chosen - whole)[:, 0]
    return list(zip(*(part.tolist() for part in (own, ranks, ids, values)), strict=True))


def logprobs(asked: Sequence[Asked], measure: Measure = measure) -> list[list[Logprobs]]:
    """Return for each of ``asked`` a dict by id for each row: its token first, then the likeliest.

    ``measure`` computes the figures.
    """
    figures = iter(measure(asked))
    return [[_by_id(token, *next(figures)) for token in each.tokens] for each in asked]


def _by_id(token: int, own: float, own_rank: int, ids: list[int], values: list[float]) -> Logprobs:
    of_row = {token: Logprob(own, own_rank)}
    for rank, (id, value) in enumerate(zip(ids, values, strict=True), 1):
        of_row.setdefault(id, Logprob(value, rank))
    return of_row
