"""Quantises rows of weights to the blocks of GGUF files.

The layouts of blocks are ggml's. Which numbers stand in them is searched for here: weights come
without data on what they multiply, so an error counts squared, times the size of its weight
(``quantize``). Groups stand side by side, so that torch's loops are long: x [group, groups].
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from ..base.config import Recipe
from ..base.limits import LARGEST_FLOAT
from .formats.gguf_types import SIZES, Kind
from .quantize import best_grid, codes_of, inverse_of

Blocks = npt.NDArray[np.uint8]

EVEN = {Kind.Q4_0: 4, Kind.Q5_0: 5}
"""Types of blocks of 32 with one scale, and their bits."""
UNEVEN = {Kind.Q4_K: 4, Kind.Q5_K: 5}
"""Types of blocks of 8 groups of 32, each with a scale and a minimum of 6 bits, and their bits."""
SHARES = (-0.04, 0.0, 0.04, 0.09)
"""Shares of a group's range that a grid may leave out at either end."""
NEAR = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1))
"""Steps from a scale and a minimum of 6 bits to those that are tried."""
ROUNDS = 2
"""How often a block's two fp16 numbers are solved for again."""
LARGEST = 63
HALF = 65504.0
"""The largest number of fp16."""
FLAT = 1e-5
"""Share of a determinant's terms below which it is rounding."""


def encode(weights: torch.Tensor, kind: Kind) -> Blocks:
    """Return ``weights`` fp32 [rows, inputs] as blocks: uint8 [rows, bytes].

    The inputs are a multiple of the block's. Raises ValueError: a weight is not finite, or beyond
    what the fp16 of the types with fewer bits holds.
    """
    most = LARGEST_FLOAT if kind == Kind.F32 else HALF
    if not bool((weights.abs() <= most).all()):
        raise ValueError(f"a weight is not finite, or its size is above {most:g}")
    rows, inputs = weights.shape
    if kind in UNEVEN:
        blocks = _uneven(weights.reshape(-1, 32).T.contiguous(), UNEVEN[kind])
    elif kind in EVEN:
        blocks = _even(weights.reshape(-1, 32).T.contiguous(), EVEN[kind])
    elif kind == Kind.Q6_K:
        blocks = _six(weights.reshape(-1, 16).T.contiguous())
    else:
        plain = quants.quantize(weights.contiguous().numpy(), GGMLQuantizationType(kind))
        return plain.view(np.uint8)
    size, octets = SIZES[kind]
    return blocks.numpy().reshape(rows, inputs // size * octets)


def _octets(half: torch.Tensor) -> torch.Tensor:
    """Return fp16 numbers, one of each block, as uint8 [blocks, 2]."""
    return half.flatten().view(torch.uint8).view(-1, 2)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return the low 4 bits of codes uint8 [..., 2, n], the second n above the first: [..., n]."""
    return codes[..., 0, :] & 15 | codes[..., 1, :] << 4


def _even(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return Q4_0 or Q5_0 of x [32, blocks]: a scale, then codes."""
    scale, zero = best_grid(x, Recipe(bits, 32))
    half = scale.half()
    codes = codes_of(x, inverse_of(half.float()), zero, bits).to(torch.uint8).T
    parts = [_octets(half), _nibbles(codes.reshape(-1, 2, 16))]
    if bits == 5:
        high = (codes >> 4).reshape(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)
        parts.insert(1, high.sum(2, dtype=torch.uint8))
    return torch.cat(parts, 1)


def _six(x: torch.Tensor) -> torch.Tensor:
    """Return Q6_K of x [16, groups]: codes, int8 scales of 16 groups, a scale of these."""
    scale, zero = best_grid(x, Recipe(6, 16))
    wide = scale.view(-1, 16)
    largest = wide.gather(1, wide.abs().argmax(1, keepdim=True))
    half = (largest / -128).half()
    unit = half.float().expand(-1, 16).reshape(1, -1)
    first = (scale * inverse_of(unit)).round_()
    size, best = x.abs(), torch.full_like(scale, torch.inf)
    steps = torch.zeros_like(scale)
    for near in (0, 1, -1):
        tried = (first + near).clamp_(-128, 127)
        step = tried * unit
        codes = codes_of(x, inverse_of(step), zero, 6).sub_(zero)
        error = codes.mul_(step).sub_(x).square_().mul_(size).sum(0, keepdim=True)
        better = error < best
        best, steps = torch.where(better, error, best), torch.where(better, tried, steps)
    codes = codes_of(x, inverse_of(steps * unit), zero, 6).to(torch.uint8).T
    quarters = codes.reshape(-1, 2, 4, 32)
    low = _nibbles(quarters.view(-1, 2, 2, 2, 32).transpose(2, 3))
    high = (quarters >> 4 << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]).sum(
        2, dtype=torch.uint8
    )
    signed = steps.view(-1, 16).to(torch.int8).view(torch.uint8)
    return torch.cat([low.flatten(1), high.flatten(1), signed, _octets(half)], 1)


def _uneven(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return Q4_K or Q5_K of x [32, groups]: two scales, scales and minima of 8 groups, codes.

    A weight is d * scale * code - e * minimum, d and e in fp16, scale and minimum of 6 bits.
    """
    top = (1 << bits) - 1
    size = x.abs().add_(x.square().mean(0, keepdim=True).sqrt_())
    scale, least = _best_range(x, size, top)
    units = [(e.view(-1, 8).amax(1, keepdim=True) / LARGEST).half() for e in (scale, least)]
    steps, lows = (
        (each.view(-1, 8) * inverse_of(unit.float())).round_().clamp_(0, LARGEST).view(1, -1)
        for each, unit in zip((scale, least), units, strict=True)
    )
    steps, lows, error = _nearest(x, size, top, units, steps, lows)
    for _ in range(ROUNDS):
        again = _solved(x, size, top, units, steps, lows)
        tried = _nearest(x, size, top, again, steps, lows)
        better = tried[2].view(-1, 8).sum(1, keepdim=True) < error.view(-1, 8).sum(1, keepdim=True)
        units = [torch.where(better, a, b) for a, b in zip(again, units, strict=True)]
        wide = better.expand(-1, 8).reshape(1, -1)
        steps, lows, error = (
            torch.where(wide, a, b) for a, b in zip(tried, (steps, lows, error), strict=True)
        )
    step, low = _applied(units, steps, lows)
    codes = _above(x, step, low, top).to(torch.uint8).T.reshape(-1, 8, 32)
    s, m = (each.to(torch.uint8).view(-1, 8) for each in (steps, lows))
    packed = torch.cat(
        [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6,
         s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1
    )  # fmt: skip
    parts = [*map(_octets, units), packed, _nibbles(codes.view(-1, 4, 2, 32)).flatten(1)]
    if bits == 5:
        high = codes >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]
        parts.insert(3, high.sum(1, dtype=torch.uint8))
    return torch.cat(parts, 1)


def _applied(
    units: list[torch.Tensor], steps: torch.Tensor, lows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each group's scale and minimum, fp32 [1, groups]."""
    d, e = (unit.float().expand(-1, 8).reshape(1, -1) for unit in units)
    return d * steps, e * lows


def _above(x: torch.Tensor, step: torch.Tensor, low: torch.Tensor, top: int) -> torch.Tensor:
    """Return the nearest codes of x + low, from 0 to ``top``, as fp32."""
    inverse = inverse_of(step)
    return (x * inverse).add_(low * inverse).round_().clamp_(0, top)


def _best_range(x: torch.Tensor, size: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each group's best scale and minimum, fp32 [1, groups] of at least 0.

    For some ranges codes are rounded, scale and minimum solved for, and the best pair wins.
    """
    sized = x * size
    total, along = size.sum(0, keepdim=True), sized.sum(0, keepdim=True)
    low, high = x.amin(0, keepdim=True).clamp_max_(0), x.amax(0, keepdim=True).clamp_min_(0)
    best = torch.full_like(low, -1.0)
    scale, least = torch.zeros_like(low), torch.zeros_like(low)
    for below, above in product(SHARES, SHARES):
        start, width = low + (high - low) * below, (high - low) * ((1 - below - above) / top)
        codes = _above(x, width, -start, top)
        first, second = (codes * size).sum(0, keepdim=True), (codes * sized).sum(0, keepdim=True)
        square = codes.square_().mul_(size).sum(0, keepdim=True)
        step, down = _two(square, first, total, second, along)
        alone = (down < 0) | (step <= 0)
        step = torch.where(alone, second * inverse_of(square), step)
        down = torch.where(alone, 0.0, down)
        flat = square * total - first * first <= FLAT * square * total  # all codes are the same
        step, down = torch.where(flat, width, step), torch.where(flat, -start, down).clamp_min_(0)
        gain = 2 * (step * second - down * along)
        gain -= step * step * square - 2 * step * down * first + down * down * total
        better = (gain > best) & (step > 0)
        best = torch.where(better, gain, best)
        scale, least = torch.where(better, step, scale), torch.where(better, down, least)
    return scale, least


def _two(
    aa: torch.Tensor, ab: torch.Tensor, bb: torch.Tensor, ax: torch.Tensor, bx: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return p and q for which p a - q b is nearest to x, from sums of products; 0 where free."""
    inverse = inverse_of(aa * bb - ab * ab)
    return (ax * bb - ab * bx) * inverse, (ab * ax - aa * bx) * inverse


def _nearest(
    x: torch.Tensor,
    size: torch.Tensor,
    top: int,
    units: list[torch.Tensor],
    steps: torch.Tensor,
    lows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the best of the 6-bit numbers near ``steps`` and ``lows``, and their error."""
    best = torch.full_like(steps, torch.inf)
    chosen = steps, lows
    for more, deeper in NEAR:
        tried = (steps + more).clamp_(0, LARGEST), (lows + deeper).clamp_(0, LARGEST)
        step, low = _applied(units, *tried)
        codes = _above(x, step, low, top)
        error = codes.mul_(step).sub_(low).sub_(x).square_().mul_(size).sum(0, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        chosen = (
            torch.where(better, tried[0], chosen[0]), torch.where(better, tried[1], chosen[1])
        )  # fmt: skip
    return *chosen, best


def _solved(
    x: torch.Tensor,
    size: torch.Tensor,
    top: int,
    units: list[torch.Tensor],
    steps: torch.Tensor,
    lows: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the two scales of each block that fit its codes best, fp16 [blocks, 1]."""
    codes = _above(x, *_applied(units, steps, lows), top)
    sized = codes * size
    sums = (
        (sized * codes).sum(0) * steps * steps, sized.sum(0) * steps * lows,
        size.sum(0) * lows * lows, (sized * x).sum(0) * steps, (size * x).sum(0) * lows,
    )  # fmt: skip
    d, e = _two(*(each.view(-1, 8).sum(1, keepdim=True) for each in sums))
    kept = (d <= 0) | (e < 0)
    return [torch.where(kept, unit, each.half()) for unit, each in zip(units, (d, e), strict=True)]
