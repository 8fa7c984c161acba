"""Quantises rows of weights to the blocks of GGUF files.

The layouts of blocks are ggml's; the numbers in them are searched for here. There are no data on
what weights multiply, so errors are squared and multiplied by the size of their weight
(``quantize``). Groups are side by side, so that numpy's loops are long: x [group, groups].
"""

from __future__ import annotations

from itertools import product

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from ..base.config import Recipe
from ..base.limits import LARGEST_FLOAT
from .formats.gguf_types import SIZES, Kind
from .quantize import Codes, Floats, best_grid, codes_of, inverse_of, total

Halves = NDArray[np.float16]

EVEN = {Kind.Q4_0: 4, Kind.Q5_0: 5}
"""Types of blocks of 32 with one scale, and their bits."""
UNEVEN = {Kind.Q4_K: 4, Kind.Q5_K: 5}
"""Types of blocks of 8 groups of 32, each with a scale and a minimum of 6 bits, and their bits."""
SHARES = (-0.04, 0.0, 0.04, 0.09)
"""Shares of a group's range that a grid may leave out at either end."""
NEAR = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))
"""Steps from a scale and a minimum of 6 bits to those that are tried."""
ROUNDS = 2
"""How often a block's two fp16 numbers are refined."""
LARGEST = 63
HALF = 65504.0
"""The largest number of fp16."""
LARGEST_SIZES = {Kind.F32: LARGEST_FLOAT, Kind.BF16: (2 - 2**-7) * 2.0**127}
"""The largest numbers of types without an fp16."""
FLAT = 1e-5
"""A determinant below this share of its terms is rounding."""


@np.errstate(all="ignore")
def encode(weights: Floats, kind: Kind) -> Codes:
    """Return ``weights`` fp32 [rows, inputs] as blocks: uint8 [rows, bytes].

    The inputs are a multiple of the block's. Raises ValueError: a weight is not finite, or, for
    types with fewer bits, beyond fp16.
    """
    most = LARGEST_SIZES.get(kind, HALF)
    if not (np.abs(weights) <= most).all():
        raise ValueError(f"a weight is not finite, or its size is above {most:g}")
    rows, inputs = weights.shape
    if kind in UNEVEN:
        blocks = _uneven(_groups(weights, 32), UNEVEN[kind])
    elif kind in EVEN:
        blocks = _even(_groups(weights, 32), EVEN[kind])
    elif kind == Kind.Q6_K:
        blocks = _six(_groups(weights, 16))
    else:
        plain = quants.quantize(np.ascontiguousarray(weights), GGMLQuantizationType(kind))
        return plain.view(np.uint8)
    size, octets = SIZES[kind]
    return blocks.reshape(rows, inputs // size * octets)


def _groups(weights: Floats, group: int) -> Floats:
    """Return groups of ``weights`` side by side: [group, groups]."""
    return np.ascontiguousarray(weights.reshape(-1, group).T)


def _octets(half: Halves) -> Codes:
    """Return fp16 numbers, one of each block, as uint8 [blocks, 2]."""
    return half.reshape(-1, 1).view(np.uint8)


def _each(block: Floats | Halves, groups: int) -> Floats:
    """Return each block's number, repeated for its groups: fp32 [1, all groups]."""
    return np.repeat(block.astype(np.float32).reshape(1, -1), groups, 1)


def _nibbles(codes: Codes) -> Codes:
    """Return the low 4 bits of codes uint8 [..., 2, n], the second n above the first: [..., n]."""
    low: Codes = codes[..., 0, :] & np.uint8(15)
    return low | codes[..., 1, :] << np.uint8(4)


def _even(x: Floats, bits: int) -> Codes:
    """Return Q4_0 or Q5_0 of x [32, blocks]: a scale, then codes."""
    scale, zero = best_grid(x, Recipe(bits, 32))
    half = scale.astype(np.float16)
    codes = codes_of(x, inverse_of(half.astype(np.float32)), zero, bits).astype(np.uint8).T
    parts = [_octets(half), _nibbles(codes.reshape(-1, 2, 16))]
    if bits == 5:
        high = (codes >> 4).reshape(-1, 4, 8) << np.arange(8, dtype=np.uint8)
        parts.insert(1, high.sum(2, dtype=np.uint8))
    return np.concatenate(parts, 1)


def _six(x: Floats) -> Codes:
    """Return Q6_K of x [16, groups]: codes, int8 scales of 16 groups, a scale of these."""
    scale, zero = best_grid(x, Recipe(6, 16))
    wide = scale.reshape(-1, 16)
    largest = np.take_along_axis(wide, np.abs(wide).argmax(1, keepdims=True), 1)
    half = (largest / -128).astype(np.float16)
    unit = _each(half, 16)
    first = np.rint(scale * inverse_of(unit))
    size, best = np.abs(x), np.full_like(scale, np.inf)
    steps = np.zeros_like(scale)
    for near in (0, 1, -1):
        tried = np.clip(first + near, -128, 127)
        step = tried * unit
        codes = codes_of(x, inverse_of(step), zero, 6)
        codes -= zero
        error = _error(codes, step, 0, x, size)
        better = error < best
        best, steps = np.where(better, error, best), np.where(better, tried, steps)
    own = codes_of(x, inverse_of(steps * unit), zero, 6).astype(np.uint8)
    quarters = own.T.reshape(-1, 2, 4, 32)
    low = _nibbles(quarters.reshape(-1, 2, 2, 2, 32).swapaxes(2, 3))
    high = quarters >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]
    signed = steps.reshape(-1, 16).astype(np.int8).view(np.uint8)
    parts = low, high.sum(2, dtype=np.uint8), signed, _octets(half)
    return np.concatenate([part.reshape(len(half), -1) for part in parts], 1)


def _error(codes: Floats, step: Floats, low: Floats | int, x: Floats, size: Floats) -> Floats:
    """Return the weighed squared errors of groups, fp32 [1, groups]; ``codes`` are overwritten."""
    codes *= step
    codes -= low
    codes -= x
    codes *= codes
    codes *= size
    return total(codes)


def _uneven(x: Floats, bits: int) -> Codes:
    """Return Q4_K or Q5_K of x [32, groups]: two scales, scales and minima of 8 groups, codes.

    A weight is d * scale * code - e * minimum, d and e in fp16, scale and minimum of 6 bits.
    """
    top = (1 << bits) - 1
    size = np.abs(x)
    size += np.sqrt(total(x * x) / len(x))
    scale, least = _best_range(x, size, top)
    units = [
        (each.reshape(-1, 8).max(1, keepdims=True) / LARGEST).astype(np.float16)
        for each in (scale, least)
    ]
    steps, lows = (
        np.clip(np.rint(each * _each(inverse_of(unit.astype(np.float32)), 8)), 0, LARGEST)
        for each, unit in zip((scale, least), units, strict=True)
    )
    steps, lows, error = _nearest(x, size, top, units, steps, lows)
    for _ in range(ROUNDS):
        again = _solved(x, size, top, units, steps, lows)
        tried = _nearest(x, size, top, again, steps, lows)
        better = _of_blocks(tried[2]) < _of_blocks(error)
        units = [np.where(better, a, b) for a, b in zip(again, units, strict=True)]
        wide = np.repeat(better.T, 8, 1)
        steps, lows, error = (
            np.where(wide, a, b) for a, b in zip(tried, (steps, lows, error), strict=True)
        )
    step, low = _applied(units, steps, lows)
    codes = _above(x, step, low, top).astype(np.uint8).T.reshape(-1, 4, 2, 32)
    s, m = (each.astype(np.uint8).reshape(-1, 8) for each in (steps, lows))
    packed = np.concatenate(
        [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6,
         s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1
    )  # fmt: skip
    parts = [*map(_octets, units), packed, _nibbles(codes).reshape(len(s), -1)]
    if bits == 5:
        high = codes.reshape(-1, 8, 32) >> 4 << np.arange(8, dtype=np.uint8)[:, None]
        parts.insert(3, high.sum(1, dtype=np.uint8))
    return np.concatenate(parts, 1)


def _of_blocks(groups: Floats) -> Floats:
    """Return the sums over each block of a number per group, fp32 [blocks, 1]."""
    return total(np.ascontiguousarray(groups.reshape(-1, 8).T)).T


def _applied(units: list[Halves], steps: Floats, lows: Floats) -> tuple[Floats, Floats]:
    """Return each group's scale and minimum, fp32 [1, groups]."""
    d, e = (_each(unit, 8) for unit in units)
    return d * steps, e * lows


def _above(x: Floats, step: Floats, low: Floats, top: int) -> Floats:
    """Return the nearest codes of x + low, from 0 to ``top``, as fp32."""
    inverse = inverse_of(step)
    codes: Floats = x * inverse
    codes += low * inverse
    np.rint(codes, out=codes)
    return np.clip(codes, 0, top, out=codes)


def _best_range(x: Floats, size: Floats, top: int) -> tuple[Floats, Floats]:
    """Return each group's best scale and minimum, fp32 [1, groups] of at least 0.

    For several ranges, codes are rounded and scale and minimum solved for; the best pair wins.
    """
    sized = x * size
    whole, along = total(size), total(sized)
    low, high = np.minimum(x.min(0, keepdims=True), 0), np.maximum(x.max(0, keepdims=True), 0)
    best = np.full_like(low, -1.0)
    scale, least = np.zeros_like(low), np.zeros_like(low)
    for below, above in product(SHARES, SHARES):
        start, width = low + (high - low) * below, (high - low) * ((1 - below - above) / top)
        codes = _above(x, width, -start, top)
        first, second = total(codes * size), total(codes * sized)
        codes *= codes
        codes *= size
        square = total(codes)
        step, down = _two(square, first, whole, second, along)
        alone = (down < 0) | (step <= 0)
        step = np.where(alone, second * inverse_of(square), step)
        down = np.where(alone, np.float32(0), down)
        flat = square * whole - first * first <= FLAT * square * whole  # all codes are the same
        step, down = np.where(flat, width, step), np.where(flat, -start, down)
        down = np.where(down < 0, np.float32(0), down)
        gain = 2 * (step * second - down * along)
        gain -= step * step * square - 2 * step * down * first + down * down * whole
        better = (gain > best) & (step > 0)
        best = np.where(better, gain, best)
        scale, least = np.where(better, step, scale), np.where(better, down, least)
    return scale, least


def _two(aa: Floats, ab: Floats, bb: Floats, ax: Floats, bx: Floats) -> tuple[Floats, Floats]:
    """Return p and q for which p a - q b is nearest to x, from sums of products; else 0."""
    inverse = inverse_of(aa * bb - ab * ab)
    return (ax * bb - ab * bx) * inverse, (ab * ax - aa * bx) * inverse


def _nearest(
    x: Floats, size: Floats, top: int, units: list[Halves], steps: Floats, lows: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the best of the 6-bit numbers near ``steps`` and ``lows``, and their error."""
    best = np.full_like(steps, np.inf)
    chosen = steps, lows
    for more, deeper in NEAR:
        tried = np.clip(steps + more, 0, LARGEST), np.clip(lows + deeper, 0, LARGEST)
        step, low = _applied(units, *tried)
        codes = _above(x, step, low, top)
        error = _error(codes, step, low, x, size)
        better = error < best
        best = np.where(better, error, best)
        chosen = np.where(better, tried[0], chosen[0]), np.where(better, tried[1], chosen[1])
    return *chosen, best


def _solved(
    x: Floats, size: Floats, top: int, units: list[Halves], steps: Floats, lows: Floats
) -> list[Halves]:
    """Return the two scales of each block that fit its codes best, fp16 [blocks, 1]."""
    codes = _above(x, *_applied(units, steps, lows), top)
    sized = codes * size
    sums = (
        total(sized * codes) * steps * steps, total(sized) * steps * lows,
        total(size) * lows * lows, total(sized * x) * steps, total(size * x) * lows,
    )  # fmt: skip
    d, e = _two(*map(_of_blocks, sums))
    kept = (d <= 0) | (e < 0)
    return [
        np.where(kept, unit, each.astype(np.float16))
        for unit, each in zip(units, (d, e), strict=True)
    ]
