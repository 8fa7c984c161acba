"""Planted logits: what a sequence's rows say instead of what the model computes for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.trees import depths
from ..native.interface import Planted
from .rows import Segment


@torch.inference_mode()
def plant(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Overwrite the rows of logits, fp32 [wanted rows, vocabulary], that have planted ones."""
    end = 0
    for segment in segments:
        start, end = end, end + segment.logits
        if segment.planted is not None:
            segment.planted.plant(logits[start:end], output_indices(segment))


def output_indices(segment: Segment) -> list[int]:
    """Return the output token that each row of logits of ``segment`` decides, 0 for the first."""
    last = segment.start + len(segment.tokens) - 1
    rows = [*range(segment.start, last + 1), *(last + d for d in depths(segment.parents))]
    return [row + 1 - segment.prompt_length for row in rows[len(rows) - segment.logits :]]


def entries(segment: Segment) -> Planted | None:
    """Return what is planted for a segment's rows as the library takes it, None for nothing."""
    track = segment.planted
    if track is None:
        return None
    return Planted(track.ids, track.z, track.rest, segment.prompt_length)
