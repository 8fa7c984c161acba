"""The draw in one Triton kernel: Philox, the noise, z + g and its argmax, for GPUs.

The arithmetic is that of ``sampling.noise``, operation by operation, so the bits are too. Fusing a
product with a sum would change them and is turned off.
"""

import os

import torch
import triton
import triton.language as tl

from ...sampling import noise

WIDTH = 256  # quarters (four ids) that a program looks at
M0, M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
W0, W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
TWO_THIRDS, EXPONENT = tl.constexpr(noise.TWO_THIRDS), tl.constexpr(noise.EXPONENT)
C10 = tl.constexpr(noise.C10)
C9, C8, C7, C6, C5, C4, C3, C2 = (tl.constexpr(c) for c in noise.C9_TO_C2)
LN2_HI, LN2_LO = tl.constexpr(noise.LN2_HI), tl.constexpr(noise.LN2_LO)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _neg_log(f, n):
    q = f * C10
    q = (q + C9) * f
    q = (q + C8) * f
    q = (q + C7) * f
    q = (q + C6) * f
    q = (q + C5) * f
    q = (q + C4) * f
    q = (q + C3) * f
    q = (q + C2) * f
    q = q * f
    return ((n * LN2_LO - q) - f) + n * LN2_HI


@triton.jit
def _gumbel(word):
    odd = (word.to(tl.int64) << 1) | 1
    w = tl.minimum(odd.to(tl.float32) * 1.1641532182693481e-10, 0.999999940395355224609375)
    s = ((1.0 - w).to(tl.int32, bitcast=True) - TWO_THIRDS) & EXPONENT
    n = s.to(tl.float32) * -1.1920928955078125e-07
    t = (0x3F800000 - s).to(tl.float32, bitcast=True)
    e = _neg_log((t - 1.0) - w * t, n)
    bits = e.to(tl.int32, bitcast=True)
    s = (bits - TWO_THIRDS) & EXPONENT
    n = s.to(tl.float32) * -1.1920928955078125e-07
    return _neg_log((bits - s).to(tl.float32, bitcast=True) - 1.0, n)


@triton.jit
def _best(score, token, other_score, other_token):
    better = (other_score > score) | ((other_score == score) & (other_token < token))
    return tl.where(better, other_score, score), tl.where(better, other_token, token)


@triton.jit
def _lane(z_ptr, quarter, word, noisy, size, LANE: tl.constexpr):
    token = quarter * 4 + LANE
    inside = token < size
    z = tl.load(z_ptr + token, mask=inside, other=float("-inf"))
    if noisy:
        z = z + _gumbel(word)
    return tl.where(inside, z, float("-inf")), token


@triton.jit
def _draw_kernel(
    z_ptr, z_stride, seed_ptr, position_ptr, greedy_ptr, best_ptr, token_ptr, blocks, size,
    HAS_GREEDY: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    quarter = block * WIDTH + tl.arange(0, WIDTH)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    noisy = True
    if HAS_GREEDY:
        noisy = tl.load(greedy_ptr + row) == 0
    zero = (quarter * 0).to(tl.uint32)
    c0 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = quarter.to(tl.uint32)
    c2 = zero
    c3 = zero
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * M0
        p1 = c2.to(tl.uint64) * M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = (p1 & 0xFFFFFFFF).to(tl.uint32)
        c3 = (p0 & 0xFFFFFFFF).to(tl.uint32)
        k0 = ((k0.to(tl.uint64) + W0) & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((k1.to(tl.uint64) + W1) & 0xFFFFFFFF).to(tl.uint32)
    z_row = z_ptr + row * z_stride
    score, token = _lane(z_row, quarter, c0, noisy, size, 0)
    other, name = _lane(z_row, quarter, c1, noisy, size, 1)
    score, token = _best(score, token, other, name)
    other, name = _lane(z_row, quarter, c2, noisy, size, 2)
    score, token = _best(score, token, other, name)
    other, name = _lane(z_row, quarter, c3, noisy, size, 3)
    score, token = _best(score, token, other, name)
    best = tl.max(score, axis=0)
    first = tl.min(tl.where(score == best, token, size), axis=0)
    tl.store(best_ptr + row * blocks + block, best)
    tl.store(token_ptr + row * blocks + block, tl.minimum(first, size - 1))


def draw(
    z: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, greedy: torch.Tensor | None
) -> torch.Tensor:
    """Return what ``draws.draw`` returns, of the same arguments on a GPU (or interpreted)."""
    rows, size = z.shape
    blocks = triton.cdiv(size, 4 * WIDTH)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=z.device)
    token = torch.empty((rows, blocks), dtype=torch.int32, device=z.device)
    z = z if z.stride(1) == 1 else z.contiguous()
    options = {} if INTERPRETED else {"enable_fp_fusion": False}
    if rows:
        _draw_kernel[(rows, blocks)](
            z, z.stride(0), seeds, positions, seeds if greedy is None else greedy.to(torch.int8),
            best, token, blocks, size, HAS_GREEDY=greedy is not None, WIDTH=WIDTH, **options,
        )  # fmt: skip
    highest = best.amax(-1, keepdim=True)
    # The lowest id among equals: `argmax` may return any of them on a GPU.
    return token.masked_fill(best != highest, size).amin(-1).clamp(max=size - 1).to(torch.int64)
