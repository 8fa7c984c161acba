"""Quantised matrices, and the search for the grid that quantises a matrix best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..base.config import Recipe
from .coded import Coded

BITS = (4, 8)
BLOCK = 1 << 16
"""Weights that are searched at once; every pass over them stays in the cache."""
STEPS = (-0.8, -0.4, -0.1, 0.2, 0.5, 0.8, 1.2)
"""Distances, in codes, of a group's largest weight beyond the outermost code.

Twice as many steps gained almost nothing.
"""
SHARES = (0.75, 0.85, 0.92, 0.98, 1.04)
"""Shares of a group's range that a grid with a zero point may cover."""
EXPONENTS = 14
"""fp16 is exact to 11 bits from 2^-14 up to 2^15; far smaller scales may lose some bits."""
TINY = 1e-30


@dataclass(frozen=True)
class Quantized:
    """A matrix w[o, i] = scales[o, i // group] * (codes[o, i] - zeros[o, i // group]).

    ``codes`` are uint8 [out, in] below 2**bits (4 or 8), ``scales`` fp32 [out, groups] of either
    sign, ``zeros`` uint8 [out, groups]; None is 2**(bits - 1) everywhere: a symmetric recipe. The
    last group may be short; a group is a whole row at most ("per channel").
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix."""
        return (self.codes.shape[0], self.codes.shape[1])

    def dequantized(self, dtype: torch.dtype, groups: torch.Tensor | None = None) -> torch.Tensor:
        """Return the matrix [out, in], computed in fp32 and rounded to ``dtype``.

        ``groups`` int64 [in] are the inputs' groups, if these are not contiguous.
        """
        if groups is None:
            groups = torch.arange(self.codes.shape[1]) // self.group
        offset: torch.Tensor | int = 1 << (self.bits - 1)
        if self.zeros is not None:
            offset = self.zeros.int()[:, groups]
        return ((self.codes.int() - offset) * self.scales[:, groups]).to(dtype)

    def rows(self, index: torch.Tensor) -> Quantized:
        """Return the outputs ``index``, in that order."""
        zeros = None if self.zeros is None else self.zeros[index]
        return Quantized(self.codes[index], self.scales[index], zeros, self.bits, self.group)

    @staticmethod
    def stacked(parts: list[Quantized]) -> Quantized:
        """Return the outputs of ``parts``, which share bits and group."""
        first, zeros = parts[0], None
        if any(p.zeros is not None for p in parts):
            middle = torch.tensor(1 << (first.bits - 1), dtype=torch.uint8)
            each = (middle.expand_as(p.scales) if p.zeros is None else p.zeros for p in parts)
            zeros = torch.cat(list(each))
        return Quantized(
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scales for p in parts]),
            zeros,
            first.bits,
            first.group,
        )


Matrix = torch.Tensor | Quantized | Coded


def quantize(weight: torch.Tensor, recipe: Recipe) -> Quantized:
    """Return ``weight`` [out, in] quantised by ``recipe``, each group on the grid of least error.

    The error is the squared error times the size of the weight: squares alone favour grids that
    clip the largest weights, which costs the pocket target perplexity. Candidates are scales (and
    zero points) around those that just span the group: codes are rounded, the best scale for these
    codes is solved for, and the best candidate wins. A scale may be negative: the code
    -2**(bits - 1) has no counterpart, so it serves either sign. Scales are rounded to fp16 times
    one power of two for the matrix before the final codes are chosen. A weight that is not finite
    raises ValueError.
    """
    out, inputs = weight.shape
    group = min(recipe.group or inputs, inputs)
    groups = -(-inputs // group)
    codes = torch.empty(out, groups * group, dtype=torch.uint8)
    scales = torch.empty(out, groups)
    zeros = torch.empty(out, groups, dtype=torch.uint8)
    unit = _unit(weight, recipe.bits)
    step = max(1, BLOCK // inputs)
    for begin in range(0, out, step):
        rows = slice(begin, begin + step)
        block = F.pad(weight[rows].float(), (0, groups * group - inputs))
        # Groups side by side, so that torch's loops are long.
        x = block.view(-1, group).T.contiguous()
        scale, zero = best_grid(x, recipe)
        scale = (scale / unit).half().float() * unit
        block_codes = codes_of(x, inverse_of(scale), zero, recipe.bits).to(torch.uint8)
        codes[rows] = block_codes.T.reshape(-1, groups * group)
        scales[rows], zeros[rows] = scale.view(-1, groups), zero.view(-1, groups)
    offsets = zeros if recipe.zeros else None
    return Quantized(codes[:, :inputs].contiguous(), scales, offsets, recipe.bits, group)


def _unit(weight: torch.Tensor, bits: int) -> float:
    """Return the power of two that scales are multiples of: 1, unless fp16 cannot hold them."""
    low, high = map(float, weight.aminmax())  # without a copy of the weights
    largest = max(high, -low) / (1 << (bits - 1))
    if not math.isfinite(largest):
        raise ValueError("a weight is not a finite number")
    exponent = math.frexp(largest)[1]
    return 1.0 if largest == 0 or abs(exponent) < EXPONENTS else 2.0 ** (exponent - EXPONENTS)


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, or 0 where the scale is below ``TINY``."""
    return torch.where(scale.abs() < TINY, 0.0, 1 / scale)


def codes_of(x: torch.Tensor, inverse: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the nearest codes of x [group, groups] as fp32; inverse and zero are [1, groups]."""
    return (x * inverse).add_(zero).round_().clamp_(0, (1 << bits) - 1)


def best_grid(x: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point, fp32 [1, groups], of each group of x [group, groups]."""
    size = x.abs()
    sized = x * size

    def fit(inverse: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best scale for a grid's codes, and its gain over all zeros."""
        codes = codes_of(x, inverse, zero, recipe.bits).sub_(zero)
        along = (codes * sized).sum(0, keepdim=True)
        scale = along / codes.square_().mul_(size).sum(0, keepdim=True).clamp_min(TINY)
        return scale, scale * along

    best = x.new_full((1, x.shape[1]), -1.0)
    scale, zero = torch.zeros_like(best), torch.zeros_like(best)
    for inverse, offset in _with_zeros(x, recipe.bits) if recipe.zeros else _even(x, recipe.bits):
        fitted, gain = fit(inverse, offset)
        better = gain > best
        best = torch.where(better, gain, best)
        scale, zero = torch.where(better, fitted, scale), torch.where(better, offset, zero)
    return fit(inverse_of(scale), zero)[0], zero


def _even(x: torch.Tensor, bits: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield symmetric grids (1 / scale, zero point): the largest weight near the last code."""
    half = 1 << (bits - 1)
    largest = x.gather(0, x.abs().argmax(0, keepdim=True))
    inverse, zero = inverse_of(largest), torch.full_like(largest, half)
    for step in STEPS:
        yield inverse * -(half + step), zero


def _with_zeros(x: torch.Tensor, bits: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield grids with zero points (1 / scale, zero point), narrowed towards their middle."""
    top = (1 << bits) - 1
    low, high = x.amin(0, keepdim=True).clamp_max(0), x.amax(0, keepdim=True).clamp_min(0)
    for share in SHARES:
        inverse = inverse_of((high - low) * (share / top))
        yield inverse, (top / 2 - (high + low) / 2 * inverse).round_().clamp_(0, top)
