"""Log probabilities of tokens, for those who ask; they change no draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..types import Logprob, Logprobs


def logprobs(z: torch.Tensor, tokens: Sequence[int], count: int) -> list[Logprobs]:
    """What each row's law says of its token and of the likeliest ones.

    Args:
        z: fp32 [rows, vocabulary], unnormalised log-weights: raw logits or a processed law.
        tokens: the token of each row.
        count: how many of the likeliest to add, 0 or more.

    Returns:
        By id, the row's token first; ranks count from 1, as vLLM's do.
    """
    whole = z.logsumexp(-1, keepdim=True)
    chosen = z.gather(1, torch.tensor(tokens, device=z.device)[:, None])
    ranks = ((z > chosen).sum(-1) + 1).tolist()
    best = z.topk(min(count, z.shape[1]), -1)
    own, top = (chosen - whole)[:, 0].tolist(), (best.values - whole).tolist()
    found = []
    for row, (token, ids) in enumerate(zip(tokens, best.indices.tolist(), strict=True)):
        of_row = {token: Logprob(own[row], ranks[row])}
        for rank, (id, value) in enumerate(zip(ids, top[row], strict=True), 1):
            of_row.setdefault(id, Logprob(value, rank))
        found.append(of_row)
    return found
