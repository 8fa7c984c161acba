"""The draw and the acceptance on tensors: y = argmax(z + g), and a draft stands where it is y.

Rows are positions that a token is drawn for. A request's noise has sample index 0: vLLM numbers
the samples of a request by their seeds. Seeds are int64, the two's complement of [0, 2^64).
"""

from __future__ import annotations

import hashlib
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from ...sampling.noise import gumbel
from ...sampling.philox import WORD
from ...sampling.seeds import request_seed
from .gumbel import gumbel_of_tensors

if TYPE_CHECKING:
    from ...native.library import Library

NEVER = float("-inf")
PLACEHOLDER = -1  # no token: vLLM's filling behind the last token of a request


def seed_of(request_id: str, seed: int | None, engine_seed: int) -> int:
    """Return the seed of a request in [0, 2^64), a negative one counted from 2^64 downwards.

    A request without one gets the seed that Outrider's engine gives to the request of that number,
    the first 64 bits of SHA-256 of its id: the same on every rank.
    """
    if seed is not None:
        return seed % 2**64
    return _unseeded(request_id, engine_seed % 2**64)


@lru_cache(maxsize=4096)
def _unseeded(request_id: str, engine_seed: int) -> int:
    digest = hashlib.sha256(request_id.encode()).digest()
    return request_seed(engine_seed, int.from_bytes(digest[:8], "little"))


def signed(seed: int) -> int:
    """Return the int64 with the bits of a seed."""
    return seed - 2**64 if seed >= 2**63 else seed


def noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Outrider's noise, fp32 [rows, vocab_size], for int64 seeds and positions [rows]."""
    if seeds.device.type == "cpu":
        unsigned = [seed % 2**64 for seed in seeds.tolist()]
        rows = [0] * len(unsigned)
        return torch.from_numpy(gumbel(unsigned, rows, positions.tolist(), vocab_size))
    return gumbel_of_tensors(seeds, positions, vocab_size)


def draw(
    z: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, greedy: torch.Tensor | None
) -> torch.Tensor:
    """Return each row's token, int64 [rows], the lowest id on a tie.

    Args:
        z: fp32 processed logits [rows, vocabulary]; not changed.
        seeds, positions: int64 [rows]; a position is the token's index in prompt + output.
        greedy: bool [rows], the rows without noise; None where all have noise.
    """
    if z.device.type == "cuda":
        from . import kernel  # Triton comes with vLLM for GPUs

        return kernel.draw(z, seeds, positions, greedy)
    if z.device.type == "cpu" and (step := _native()) is not None and len(z):
        return _drawn_natively(step, z, seeds, positions, greedy)
    if greedy is None:
        return (z + noise(seeds, positions, z.shape[1])).argmax(-1)
    if z.device.type == "cpu":  # a count of rows costs no wait here
        rows = (~greedy).nonzero().flatten()
        g = noise(seeds[rows], positions[rows], z.shape[1])
        return z.index_add(0, rows, g).argmax(-1)
    g = noise(seeds, positions, z.shape[1])
    return (z + g.masked_fill_(greedy[:, None], 0)).argmax(-1)


@cache
def _native() -> Library | None:
    """Return the native step, which draws the same several times as fast; None where it is not."""
    from ...native.choice import available, library

    return library() if available() else None


def _drawn_natively(
    step: Library,
    z: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    greedy: torch.Tensor | None,
) -> torch.Tensor:
    keys = [
        (seed & WORD, seed >> 32 & WORD, position, 0)
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    z = z if z.stride(1) == 1 and z.dtype == torch.float32 else z.float().contiguous()
    cold = [False] * len(z) if greedy is None else greedy.tolist()
    return torch.tensor(step.draw(z.numpy(), keys, cold)[0], dtype=torch.int64)


def truncate(
    z: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Mask what top_k and top_p leave out of z, fp32 [rows, vocabulary], in place; return it.

    Ties are Outrider's: top_k keeps those with the k-th, top_p takes the lowest id first. A row's
    mask does not depend on how many rows there are. ``top_k``, 1 or more, and ``top_p`` in (0, 1]
    are [rows]; None for no row.
    """
    if not len(z) or (top_k is None and top_p is None):
        return z
    size = z.shape[1]
    if top_p is None and top_k is not None and z.device.type == "cpu":
        tops = z.topk(min(int(top_k.max()), size), -1).values
        return z.masked_fill_(z < _kth(tops, top_k), NEVER)
    ordered, ids = z.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered.masked_fill_(ordered < _kth(ordered, top_k), NEVER)
    if top_p is not None:
        mass = ordered.softmax(-1)
        out = (mass.cumsum(-1) - mass >= top_p[:, None]) & (top_p[:, None] < 1)
        ordered.masked_fill_(out, NEVER)
    return z.scatter_(-1, ids, ordered)


def _kth(ordered: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return each row's k-th value, [rows, 1]."""
    index = (k.to(torch.int64) - 1).clamp(0, ordered.shape[1] - 1)
    return ordered.gather(-1, index[:, None])


def follow(
    drawn: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's tokens as far as the drafts are those tokens, and one more.

    ``drawn`` [requests, most + 1] are the target's tokens behind each number of drafted ones;
    ``drafts`` [requests, most], of which -1 never stands; ``counts`` [requests] says how many each
    has. Returns tokens [requests, most + 1], -1 behind the last, and their number.
    """
    column = torch.arange(drawn.shape[1], device=drawn.device)
    stands = (drafts == drawn[:, :-1]) & (column[:-1] < counts[:, None])
    kept = stands.to(torch.int64).cumprod(-1).sum(-1)
    return drawn.masked_fill(column > kept[:, None], PLACEHOLDER), kept + 1
