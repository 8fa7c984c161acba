"""The shared Gumbel noise: one specified function, the same bits in NumPy, torch and C++.

Words are Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011) with

    key     = (seed low word, seed high word)
    counter = (position, token id // 4, sample index, stream)
    k       = output word number (token id mod 4)

From a 32-bit word k to the noise g: every operation below is one fp32 operation, rounded to
nearest even on its own (in C++: -ffp-contract=off and no -ffast-math), unless marked exact. Only
add, sub, mul, min and integer operations occur; no subnormal, infinity or NaN does.

    w = min(fp32(k + 0.5) * 2^-32, 1 - 2^-24)     k + 0.5 taken exactly and rounded once: the
                                                  conversion of the integer 2k + 1, times 2^-33

  e = -log1p(-w), from 2^-33 to 16.64:
    u = 1 - w                                     only decides the range
    s = (bits(u) - 0x3f2aaaab) & 0xff800000       int32; u = 2^(s >> 23) m with m in [2/3, 4/3)
    n = fp32(s) * -2^-23                          exact; 0..24
    t = from_bits(0x3f800000 - s)                 exact; 2^n
    f = (t - 1) - w * t                           exact, all three; 2^n (1 - w) - 1
    e = neg_log(f, n)

  g = -log(e), from -2.82 to 22.88:
    s = (bits(e) - 0x3f2aaaab) & 0xff800000       e = 2^(s >> 23) m
    n = fp32(s) * -2^-23                          exact; -4..33
    f = from_bits(bits(e) - s) - 1                exact; m - 1
    g = neg_log(f, n)

  neg_log(f, n) = n log 2 - log(1 + f), f in [-1/3, 1/3]:
    q = f * C10
    q = (q + C9) * f, then the same with C8, C7, C6, C5, C4, C3 and C2
    q = q * f                                     log(1 + f) = f + q
    r = ((n * LN2_LO - q) - f) + n * LN2_HI       the product with LN2_HI is exact

`bits` and `from_bits` reinterpret fp32 as int32 and back. The constants are given below as hex
floats. C3 to C10 are our own fit: rounded to fp32 they leave a relative error of 0.08 * 2^-24 in
log(1 + f); LN2_HI and LN2_LO are fdlibm's. The error of g is below 2 ulp where |g| >= 1/2, and
below 1e-7 in absolute terms elsewhere; the tests hold it to that.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .philox import WORD, Words, check, rounds

SHARED_STREAM = 0  # shared by target and drafters; the ratio rules use higher streams
Streams = int | Sequence[int]  # one for all rows, or one each

_LARGEST_W = 1.0 - 2.0**-24
TWO_THIRDS, EXPONENT, _ONE = 0x3F2AAAAB, -0x800000, 0x3F800000  # bit patterns, as int32
C10, *C9_TO_C2 = map(
    float.fromhex,
    (
        "-0x1.07c964p-3",
        "0x1.1e678cp-3",
        "-0x1.f332a6p-4",
        "0x1.1ed662p-3",
        "-0x1.559c46p-3",
        "0x1.99d044p-3",
        "-0x1.fffefcp-3",
        "0x1.555506p-2",
        "-0x1p-1",
    ),
)
LN2_HI, LN2_LO = float.fromhex("0x1.62e3p-1"), float.fromhex("0x1.2fefa2p-17")

_CHUNK = 65536  # words that NumPy works on at once, so that the intermediates stay in cache

# The same code serves both: uint64 and float32 arrays in NumPy, int64 (wrapping) and float32
# tensors in torch. In-place operators keep dtypes, and a Python float meets fp32 as fp32.
Floats = Any


def words_at(rows: Words, quarters: Words, out: Words) -> Words:
    """Write the words of `rows` [n, 5] at `quarters` [1, m] to `out` [n, m, 4]; return [n, 4 * m].

    All have one integer dtype; see `row_words` for the columns of `rows`.
    """
    position, sample, stream, low, high = (rows[:, i : i + 1] for i in range(5))
    for lane, word in enumerate(rounds((position, quarters, sample, stream), (low, high))):
        out[..., lane] = word
    return out.reshape(len(out), 4 * out.shape[1])


def _neg_log(f: Floats, n: Floats) -> Floats:
    """Return n log 2 - log(1 + f) as the module docstring defines it; overwrites `n`."""
    q = f * C10
    for c in C9_TO_C2:
        q += c
        q *= f
    q *= f
    r = n * LN2_LO
    r -= q
    r -= f
    n *= LN2_HI
    r += n
    return r


def gumbel_of_words(words: Words, of: ModuleType = np) -> Floats:
    """Return the noise g of 32-bit words, as the module docstring defines it: contiguous float32.

    Words are uint64 or int64 in NumPy, int64 in torch, each in [0, 2^32); ``of`` is their module,
    NumPy or torch.
    """
    odd = words << 1
    odd |= 1
    # Below 2^33, so the signed view is the same number, and converts faster.
    w = of.asarray(odd.view(of.int64), dtype=of.float32)
    w *= 2.0**-33
    w = w.clip(None, _LARGEST_W)

    shift = (1.0 - w).view(of.int32)
    shift -= TWO_THIRDS
    shift &= EXPONENT
    n = of.asarray(shift, dtype=of.float32)
    n *= -(2.0**-23)
    f = (_ONE - shift).view(of.float32)
    w *= f
    f -= 1.0
    f -= w
    f = _neg_log(f, n)  # e

    shift = f.view(of.int32) - TWO_THIRDS
    shift &= EXPONENT
    n = of.asarray(shift, dtype=of.float32)
    n *= -(2.0**-23)
    mantissa = f.view(of.int32)
    mantissa -= shift
    f -= 1.0
    return _neg_log(f, n)


def row_words(
    seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int], stream: Streams
) -> NDArray[np.uint64]:
    """Return Philox's input by row: uint64 [n, 5] of position, sample, stream, seed low, high."""
    streams = [stream] * len(positions) if isinstance(stream, int) else stream
    count = len(positions)
    keys = _column("seed", seeds, 64, count)
    named = ("position", positions), ("sample index", samples), ("stream", streams)
    columns = [_column(name, values, 32, count) for name, values in named]
    return np.stack((*columns, keys & np.uint64(WORD), keys >> np.uint64(32)), 1)


def _column(name: str, values: Sequence[int], bits: int, rows: int) -> NDArray[np.uint64]:
    """Return the values as uint64 [rows]."""
    if len(values) != rows:
        raise ValueError(f"{rows} rows came with {len(values)} of {name}")
    for value in (min(values), max(values)) if rows else ():
        check(name, value, bits)
    return np.array(values, np.uint64)


def check_vocab_size(size: int) -> int:
    """Return the size of a vocabulary; ValueError for less than 1."""
    if size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {size}")
    return size


def quarters_of(vocab_size: int) -> int:
    """Return how many groups of four ids a vocabulary has."""
    return (check_vocab_size(vocab_size) + 3) // 4


def words(
    seeds: Sequence[int],
    samples: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    stream: Streams = SHARED_STREAM,
) -> NDArray[np.uint32]:
    """Return the words that `gumbel` of these arguments comes from: uint32 [rows, vocab_size]."""
    rows = row_words(seeds, samples, positions, stream)
    return _numpy_words(rows, quarters_of(vocab_size))[:, :vocab_size].astype(np.uint32)


def _numpy_words(rows: NDArray[np.uint64], quarters: int) -> NDArray[Any]:
    """Return uint64 [n, 4 * quarters]."""
    out = np.empty((len(rows), quarters, 4), np.uint64)
    numbers = np.arange(quarters, dtype=np.uint64)[None]
    made: NDArray[np.uint64] = words_at(rows, numbers, out)
    return made


def gumbel(
    seeds: Sequence[int],
    samples: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    stream: Streams = SHARED_STREAM,
) -> NDArray[np.float32]:
    """Return Gumbel noise for every token id: float32 [rows, vocab_size] in [-2.82, 22.88].

    Seeds are in [0, 2^64), sample indices, positions in prompt + output, and streams in [0, 2^32),
    one per row, else ValueError. A smaller vocabulary gets a larger one's first columns.
    """
    rows, quarters = row_words(seeds, samples, positions, stream), quarters_of(vocab_size)
    out = np.empty((len(rows), vocab_size), np.float32)
    step = max(1, _CHUNK // vocab_size)
    for start in range(0, len(rows), step):
        chunk = _numpy_words(rows[start : start + step], quarters)[:, :vocab_size]
        out[start : start + step] = gumbel_of_words(chunk)
    return out
