"""Outrider's rule in vLLM's V2 runner, ``vllm.v1.worker.gpu``.

Plain rows and drafts come through ``gumbel_sample``, verified rows through ``rejection_sample``.
In both, ``pos`` is the index of the token before the one that is drawn. Drafts are drawn with the
target's noise: vLLM salts it, for its own rule would be wrong otherwise.
"""

from typing import Any

import torch

from ..common.draws import draw, follow, truncate


def gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool,
    is_drafting: bool = False,
    **named: Any,
) -> torch.Tensor:
    """Return the token of each row, int64 [rows].

    ``expanded_idx_mapping`` is each row's request, below 0 for rows that do not count; a
    temperature of 0 is greedy. ``is_drafting`` and ``named``, such as ``logits_cache``, are without
    meaning here.
    """
    requests = expanded_idx_mapping.to(torch.int64).clamp(min=0)
    z = logits.to(torch.float32)
    hot = temperature[requests]
    if apply_temperature:
        z = z / hot.masked_fill(hot == 0, 1)[:, None]
    return draw(z, seed[requests], pos.to(torch.int64) + 1, hot == 0)


def rejection_sample(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    *others: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each request, -1 behind its last, and how many of them count.

    A request has a row for each drafted token and one more; ``draft_sampled`` is the token that a
    row follows, -1 for a draft that is void, ``cu_num_logits`` where each request's rows begin.
    Drafts' logits, ``idx_mapping`` and ``expanded_local_pos`` are without meaning here.
    """
    drawn = gumbel_sample(
        target_logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=False
    )
    starts, counts = cu_num_logits[:-1], cu_num_logits.diff() - 1
    column = torch.arange(num_speculative_steps + 1, device=drawn.device)
    index = (starts[:, None] + column).clamp(max=len(drawn) - 1)
    drafts = draft_sampled[(index[:, :-1] + 1).clamp(max=len(drawn) - 1)]
    tokens, number = follow(drawn[index], drafts, counts)
    return tokens, number.to(torch.int32)


def apply_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, *others: Any, **named: Any
) -> torch.Tensor:
    """Return the logits with what top_k and top_p leave out masked; they are changed in place."""
    return truncate(logits, k, p)


def unsupported() -> bool:
    """Return that a fused sampler, which draws by itself, is not supported."""
    return False
