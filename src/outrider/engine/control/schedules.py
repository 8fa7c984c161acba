"""The best draft length by batch size, in the formats of other engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...base.limits import LARGEST_DRAFT
from ...errors import shown

Range = tuple[int, int, int]
"""First and last batch size, and the draft length for them."""
Lengths = list[tuple[int, int]]
"""Batch sizes that were measured, rising, and the best draft length of each."""
WORTHWHILE_RISE = 1.05  # in speed, above which a larger batch is worth its wait
LARGEST_BATCH = 4096


def check_ranges(rows: Sequence[Range]) -> Sequence[Range]:
    """Return a schedule. Raises ValueError where it has gaps, or impossible lengths."""
    following = 1
    for first, last, length in rows:
        if first != following or last < first or not 0 <= length <= LARGEST_DRAFT:
            raise ValueError(
                f"has {shown([first, last, length])}; ranges begin at batch size {following}, do "
                f"not go backwards, and draft 0 to {LARGEST_DRAFT} tokens."
            )
        following = last + 1
    return rows


def vllm(lengths: Lengths) -> list[list[int]]:
    """Return ``num_speculative_tokens_per_batch_size``: [first, last, K] of batch sizes.

    Between two measured sizes, the smaller one's length applies.
    """
    firsts = [1, *(size for size, _ in lengths[1:])]
    lasts = [*(first - 1 for first in firsts[1:]), LARGEST_BATCH]
    merged: list[list[int]] = []
    for first, last, (_, length) in zip(firsts, lasts, lengths, strict=True):
        if merged and merged[-1][2] == length:
            merged[-1][1] = last
        else:
            merged.append([first, last, length])
    return merged


def tensorrt(ranges: Sequence[Sequence[int]]) -> dict[int, int] | None:
    """Return TensorRT-LLM's ``draft_len_schedule``: K by batch size.

    Some releases read a key as the first batch size of its range, others as the last, and older
    ones require the key 1. So both ends of a range are given, except the end of a last range that
    drafts nothing; both readings then agree. ``ranges`` are those of ``vllm``. Returns None if a
    later K is longer than the first one, which is the longest that the engine takes.
    """
    if any(length > ranges[0][2] for _, _, length in ranges):
        return None
    if not any(length for _, _, length in ranges):
        return {}
    schedule = {}
    for i, (first, last, length) in enumerate(ranges):
        schedule[first] = length
        if length or i + 1 < len(ranges):
            schedule[last] = length
    return schedule


def sglang(tiers: Sequence[tuple[int, list[int]]]) -> dict[str, Any] | None:
    """Return SGLang's adaptive flags for an EAGLE head; None where nothing is drafted.

    ``tiers`` are, by rising batch size, the lengths among which the engine adapts to acceptance.
    ``speculative_adaptive_config`` is the content of that flag's file.
    """
    first = next((max(steps) for _, steps in tiers if any(steps)), 0)
    if not first:
        return None
    slots = [(1, tiers[0][1]), *tiers[1:]]
    return {
        "speculative_adaptive": True,
        "speculative_eagle_topk": 1,
        "speculative_num_steps": first,
        "speculative_num_draft_tokens": first + 1,
        "speculative_adaptive_config": {
            str(size): {"candidate_steps": steps} for size, steps in slots
        },
    }


def limit(points: Sequence[tuple[int, float, float]], max_tpot: float | None = None) -> int | None:
    """Return the batch size beyond which a larger one brings nothing; None if each brings more.

    ``points`` have a batch size, tokens per second, and seconds that a sequence waits for a token.
    ``max_tpot`` is the longest such wait; the smallest batch counts even where it is longer.
    """
    best = points[0]
    for point in points[1:]:
        if point[1] < WORTHWHILE_RISE * best[1] or (max_tpot is not None and point[2] > max_tpot):
            return best[0]
        best = point
    return None
