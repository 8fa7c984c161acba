"""Functions of rows of logits that NumPy lacks; a row without a finite highest one gives NaN."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

FloatT = TypeVar("FloatT", np.float32, np.float64)


def softmax(z: NDArray[FloatT]) -> NDArray[FloatT]:
    """Return the probabilities of log-weights [..., ids]."""
    with np.errstate(invalid="ignore"):
        p: NDArray[FloatT] = np.exp(z - z.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
    return p


def log_sum_exp(z: NDArray[FloatT]) -> NDArray[FloatT]:
    """Return the logarithm of the sum of weights, of log-weights [..., ids]: [..., 1]."""
    top = z.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        whole: NDArray[FloatT] = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    return whole


def highest(z: NDArray[FloatT], count: int) -> NDArray[np.int64]:
    """Return the ids of each row's ``count`` highest, falling: int64 [rows, count].

    Of equal ones the lowest ids come first. NaNs come last.
    """
    ids = np.empty((len(z), count), np.int64)
    if not count:
        return ids
    z = np.fmax(z, -np.inf)  # no NaN stays
    least = np.partition(z, -count)[:, -count, None]
    for row, above, equal in zip(ids, z > least, z == least, strict=True):
        first = np.flatnonzero(above)
        row[: len(first)] = first
        row[len(first) :] = np.flatnonzero(equal)[: count - len(first)]
    order = np.argsort(-np.take_along_axis(z, ids, 1), kind="stable")
    return np.take_along_axis(ids, order, 1)


def widened(z: NDArray[FloatT], width: int) -> NDArray[FloatT]:
    """Return rows [..., ids] padded with -inf or cut to ``width`` ids; ``z`` itself if it fits."""
    if z.shape[-1] == width:
        return z
    wide = np.full((*z.shape[:-1], width), -np.inf, z.dtype)
    common = min(z.shape[-1], width)
    wide[..., :common] = z[..., :common]
    return wide
