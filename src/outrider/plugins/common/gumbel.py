"""The shared noise on torch's devices, by the very code that makes it in NumPy."""

import torch

from ...sampling.noise import gumbel_of_words, quarters_of, words_at
from ...sampling.philox import WORD


def gumbel_of_tensors(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Return the shared noise of sample 0 on the device that seeds and positions are on.

    Both are int64 [rows], seeds the two's complement of numbers in [0, 2^64). The result has the
    bits of `gumbel`: float32 [rows, vocab_size].
    """
    zeros = torch.zeros_like(seeds)
    rows = torch.stack((positions, zeros, zeros, seeds & WORD, (seeds >> 32) & WORD), 1)
    return gumbel_of_rows(rows, vocab_size)


def gumbel_of_rows(rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the noise of int64 rows as `row_words` makes them."""
    quarters = quarters_of(vocab_size)
    out = torch.empty((len(rows), quarters, 4), dtype=torch.int64, device=rows.device)
    numbers = torch.arange(quarters, dtype=torch.int64, device=rows.device)[None]
    noise: torch.Tensor = gumbel_of_words(words_at(rows, numbers, out)[:, :vocab_size], torch)
    return noise
