"""From logits to laws: what a request's options make of the model's distribution.

A law is carried as fp32 log-weights z, unnormalised: the processed logit over the temperature,
-inf where a token is masked. The order of processors, their names and scopes are vLLM's:
min_tokens, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..types import Request, Row, SamplingParams

NEVER = float("-inf")


def process(logits: torch.Tensor, request: Request, outputs: Sequence[int]) -> torch.Tensor:
    """Turn ``logits`` into laws, in place.

    Args:
        logits: fp32 [rows, vocabulary], consecutive rows of one request.
        request: its options.
        outputs: for each row, how many output tokens stand before the one that it decides.

    Returns:
        ``logits`` itself, now z.
    """
    params = request.params
    early = [i for i, n in enumerate(outputs) if n < params.min_tokens]
    ends = [i for i in request.end_token_ids if i < logits.shape[1]]
    if early and ends:
        rows = torch.tensor(early, device=logits.device)
        logits[rows[:, None], torch.tensor(ends, device=logits.device)] = NEVER
    if params.greedy:
        return logits
    if params.temperature != 1:
        logits.div_(params.temperature)
    return truncate(logits, params)


def truncate(z: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Mask what min_p, top_k and top_p leave out, in place; z is fp32 [rows, vocabulary].

    min_p keeps p >= min_p * max p; top_k keeps ties with the k-th; top_p keeps the smallest set of
    most likely tokens whose mass reaches it, the lowest id first among equals, one at least.
    """
    if params.min_p > 0:
        z.masked_fill_(z < z.amax(-1, keepdim=True) + math.log(params.min_p), NEVER)
    if 0 < params.top_k < z.shape[1]:
        z.masked_fill_(z < z.topk(params.top_k, -1).values[:, -1:], NEVER)
    if params.top_p < 1:
        ordered, ids = z.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1)
        ordered.masked_fill_(mass.cumsum(-1) - mass >= params.top_p, NEVER)
        z.scatter_(-1, ids, ordered)
    return z


@dataclass(frozen=True)
class Laws:
    """The laws of one step: z fp32 [rows, vocabulary], and whose they are, row by row.

    ``first[s]`` is the row of sequence s's last committed token, None when it draws nothing; its
    draft nodes' rows follow it in order.
    """

    z: torch.Tensor
    rows: list[Row]
    first: list[int | None]
