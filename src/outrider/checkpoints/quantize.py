"""Quantised matrices, and the search for the best grid of a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.config import Recipe
from ..base.threads import on_all_threads
from .coded import Coded
from .dtypes import FLOAT32, Array, cast

BITS = (4, 8)
BLOCK = 1 << 16
"""Weights that are searched at a time; every pass over them stays in the cache."""
STEPS = (-0.8, -0.4, -0.1, 0.2, 0.5, 0.8, 1.2)
"""Tried distances, in codes, of a group's largest weight beyond the outermost code.

Twice as many gained almost nothing.
"""
SHARES = (0.75, 0.85, 0.92, 0.98, 1.04)
"""Shares of a group's range that a grid with a zero point may cover."""
EXPONENTS = 14
"""fp16 is exact to 11 bits from 2^-14 up to 2^15; far smaller scales may lose some bits."""
TINY = 1e-30
ADDED = 16
"""Numbers that are added directly; sums of more are sums of these sums."""

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class Quantized:
    """A matrix w[o, i] = scales[o, i // group] * (codes[o, i] - zeros[o, i // group]).

    ``codes`` are uint8 [out, in] below 2**bits (4 or 8), ``scales`` fp32 [out, groups] of either
    sign, ``zeros`` uint8 [out, groups]; None is 2**(bits - 1) everywhere: a symmetric recipe. The
    last group may be short; a group is at most a whole row ("per channel").
    """

    codes: Codes
    scales: Floats
    zeros: Codes | None
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        return (self.codes.shape[0], self.codes.shape[1])

    def dequantized(self, dtype: np.dtype[Any], groups: NDArray[np.int64] | None = None) -> Array:
        """Return the matrix [out, in], computed in fp32 and rounded to ``dtype``.

        ``groups`` int64 [in] are the inputs' groups, if these are not contiguous.
        """
        out, inputs = self.shape
        if groups is None:
            groups = np.arange(inputs) // self.group
        matrix, step = np.empty(self.shape, dtype), max(1, BLOCK // inputs)

        @np.errstate(all="ignore")
        def one(begin: int) -> None:
            rows = slice(begin, begin + step)
            wide = self.codes[rows].astype(np.float32)
            wide -= 1 << (self.bits - 1) if self.zeros is None else self.zeros[rows][:, groups]
            wide *= self.scales[rows][:, groups]
            matrix[rows] = wide

        for _ in on_all_threads(one, range(0, out, step)):
            pass
        return matrix

    def rows(self, index: NDArray[np.int64]) -> Quantized:
        """Return the outputs ``index``, in that order."""
        zeros = None if self.zeros is None else self.zeros[index]
        return Quantized(self.codes[index], self.scales[index], zeros, self.bits, self.group)

    @staticmethod
    def stacked(parts: list[Quantized]) -> Quantized:
        """Return the outputs of ``parts``, which share bits and group."""
        first, zeros = parts[0], None
        if any(p.zeros is not None for p in parts):
            middle = np.uint8(1 << (first.bits - 1))
            each = (np.full(p.scales.shape, middle) if p.zeros is None else p.zeros for p in parts)
            zeros = np.concatenate(list(each))
        return Quantized(
            np.concatenate([p.codes for p in parts]),
            np.concatenate([p.scales for p in parts]),
            zeros,
            first.bits,
            first.group,
        )


Matrix = Array | Quantized | Coded


def quantize(weight: Array, recipe: Recipe) -> Quantized:
    """Return ``weight`` [out, in] quantised by ``recipe``, each group on the grid of least error.

    The error is the squared error times the size of the weight: squares alone favour grids that
    clip the largest weights, which costs the pocket target perplexity. Candidates are scales (and
    zero points) around those that just span the group: codes are rounded, the best scale for these
    codes is solved for, and the best candidate wins. A scale may be negative: the code -2**(bits -
    1) has no positive counterpart, so the sign decides which side gets it. Scales are rounded to
    fp16 times one power of two for the matrix before the final codes are chosen. Raises ValueError:
    a weight is not finite, or far too large.
    """
    out, inputs = weight.shape
    group = min(recipe.group or inputs, inputs)
    groups = -(-inputs // group)
    codes = np.empty((out, inputs), np.uint8)
    scales = np.empty((out, groups), np.float32)
    zeros = np.empty((out, groups), np.uint8)
    unit = _unit(weight, recipe.bits)
    step = max(1, BLOCK // inputs)

    @np.errstate(all="ignore")
    def one(begin: int) -> None:
        rows = slice(begin, begin + step)
        block = cast(weight[rows], FLOAT32)
        if groups * group > inputs:
            block = np.pad(block, ((0, 0), (0, groups * group - inputs)))
        # Groups side by side, so that numpy's loops are long.
        x = np.ascontiguousarray(block.reshape(-1, group).T)
        scale, zero = best_grid(x, recipe)
        scale = (scale / unit).astype(np.float16).astype(np.float32) * unit
        best = codes_of(x, inverse_of(scale), zero, recipe.bits).astype(np.uint8)
        codes[rows] = best.T.reshape(len(block), -1)[:, :inputs]
        scales[rows], zeros[rows] = scale.reshape(-1, groups), zero.reshape(-1, groups)

    for _ in on_all_threads(one, range(0, out, step)):
        pass
    if not np.isfinite(scales).all():
        raise ValueError("the square of a weight is not a finite number")
    return Quantized(codes, scales, zeros if recipe.zeros else None, recipe.bits, group)


def _unit(weight: Array, bits: int) -> float:
    """Return the power of two that scales are multiples of: 1, unless fp16 cannot hold them."""
    largest = max(float(weight.max()), -float(weight.min())) / (1 << (bits - 1))
    if not math.isfinite(largest):
        raise ValueError("a weight is not a finite number")
    exponent = math.frexp(largest)[1]
    return 1.0 if largest == 0 or abs(exponent) < EXPONENTS else 2.0 ** (exponent - EXPONENTS)


def total(x: Floats) -> Floats:
    """Return the sums of x [n, m] over n, fp32 [1, m], with few rounding errors adding up."""
    rests: list[Floats] = []
    while len(x) >= ADDED:
        whole = len(x) // ADDED * ADDED
        rests.append(x[whole:].sum(0))
        x = x[:whole].reshape(-1, ADDED, x.shape[1]).sum(1)
    sums: Floats = sum([*rests[1:], x.sum(0)], rests[0]) if rests else x.sum(0)
    return sums[None]


def inverse_of(scale: Floats) -> Floats:
    """Return 1 / scale, or 0 where the scale is below ``TINY``."""
    inverse = np.zeros_like(scale)
    np.divide(1, scale, out=inverse, where=np.abs(scale) >= TINY)
    return inverse


def codes_of(x: Floats, inverse: Floats, zero: Floats, bits: int) -> Floats:
    """Return the nearest codes of x [group, groups] as fp32; inverse and zero are [1, groups]."""
    codes: Floats = x * inverse
    codes += zero
    np.rint(codes, out=codes)
    return np.clip(codes, 0, (1 << bits) - 1, out=codes)


def best_grid(x: Floats, recipe: Recipe) -> tuple[Floats, Floats]:
    """Return scale and zero point, fp32 [1, groups], of each group of x [group, groups]."""
    size = np.abs(x)
    sized = x * size

    def fit(inverse: Floats, zero: Floats) -> tuple[Floats, Floats]:
        """Return the best scale for a grid's codes, and its gain over all zeros."""
        codes = codes_of(x, inverse, zero, recipe.bits)
        codes -= zero
        along = total(codes * sized)
        codes *= codes
        codes *= size
        square: Floats = np.maximum(total(codes), TINY)
        scale = along / square
        return scale, scale * along

    best: Floats = np.full((1, x.shape[1]), -1, np.float32)
    scale: Floats = np.zeros_like(best)
    zero: Floats = np.zeros_like(best)
    for inverse, offset in _with_zeros(x, recipe.bits) if recipe.zeros else _even(x, recipe.bits):
        fitted, gain = fit(inverse, offset)
        better = gain > best
        best = np.where(better, gain, best)
        scale, zero = np.where(better, fitted, scale), np.where(better, offset, zero)
    return fit(inverse_of(scale), zero)[0], zero


def _even(x: Floats, bits: int) -> Iterator[tuple[Floats, Floats]]:
    """Yield symmetric grids (1 / scale, zero point) with the largest weight near the last code."""
    half = 1 << (bits - 1)
    largest = np.take_along_axis(x, np.abs(x).argmax(0, keepdims=True), 0)
    inverse, zero = inverse_of(largest), np.full_like(largest, half)
    for step in STEPS:
        yield inverse * -(half + step), zero


def _with_zeros(x: Floats, bits: int) -> Iterator[tuple[Floats, Floats]]:
    """Yield grids with zero points (1 / scale, zero point), narrowed towards their middle."""
    top = (1 << bits) - 1
    low, high = np.minimum(x.min(0, keepdims=True), 0), np.maximum(x.max(0, keepdims=True), 0)
    for share in SHARES:
        inverse = inverse_of((high - low) * (share / top))
        middle = np.rint(top / 2 - (high + low) / 2 * inverse)
        yield inverse, np.clip(middle, 0, top)
