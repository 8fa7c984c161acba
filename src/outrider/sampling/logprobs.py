"""Log probabilities of tokens, for those who ask; they change no draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..types import Logprob, Logprobs


@dataclass(frozen=True)
class Measured:
    """Of each row: its token's log probability and rank, then the likeliest ids and theirs."""

    own: list[float]
    ranks: list[int]
    ids: list[list[int]]
    values: list[list[float]]


Measure = Callable[[torch.Tensor, Sequence[int], Sequence[int], int], Measured]
"""``measure`` or what stands in for it."""


def measure(z: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], count: int) -> Measured:
    """Measure ``tokens`` under the laws in ``rows`` of z; arguments as of ``logprobs``."""
    z = z[list(rows)]
    whole = z.logsumexp(-1, keepdim=True)
    chosen = z.gather(1, torch.tensor(tokens, device=z.device)[:, None])
    ranks = (z > chosen).sum(-1) + 1
    best = z.topk(min(count, z.shape[1]), -1)
    return Measured(
        (chosen - whole)[:, 0].tolist(),
        ranks.tolist(),
        best.indices.tolist(),
        (best.values - whole).tolist(),
    )


def logprobs(
    z: torch.Tensor,
    rows: Sequence[int],
    tokens: Sequence[int],
    count: int,
    measure: Measure = measure,
) -> list[Logprobs]:
    """What laws say of a token each and of their likeliest ones.

    Args:
        z: fp32 [any, vocabulary], unnormalised log-weights: raw logits or processed laws.
        rows: which of them.
        tokens: the token of each of ``rows``.
        count: how many of the likeliest to add, 0 or more.
        measure: what does the work.

    Returns:
        By id, the row's token first; ranks count from 1, as vLLM's do.
    """
    measured = measure(z, rows, tokens, count)
    found = []
    for row, token in enumerate(tokens):
        of_row = {token: Logprob(measured.own[row], measured.ranks[row])}
        pairs = zip(measured.ids[row], measured.values[row], strict=True)
        for rank, (id, value) in enumerate(pairs, 1):
            of_row.setdefault(id, Logprob(value, rank))
        found.append(of_row)
    return found
