"""Planted logits: what a sequence's rows say instead of what the model computes for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..native.interface import Planted
from ..trees import depths

if TYPE_CHECKING:
    from .rows import Segment


@dataclass(frozen=True)
class Track:
    """The planted logits after one prompt, one entry an output token, the last for all that follow.

    ``ids`` int64 [n, m] have the logits ``z`` fp32 [n, m], every other id has ``rest`` fp32 [n].
    The first of the ids is the most likely, and the second comes next.
    """

    ids: torch.Tensor
    z: torch.Tensor
    rest: torch.Tensor

    def plant(self, logits: torch.Tensor, indices: Sequence[int]) -> None:
        """Overwrite logits [rows, vocabulary] by those of output tokens ``indices`` [rows].

        A row with a negative index stands within the prompt and is left as it is.
        """
        rows = [i for i, index in enumerate(indices) if index >= 0]
        if not rows:
            return
        chosen = torch.tensor([min(indices[i], len(self.ids) - 1) for i in rows])
        distribution = self.rest[chosen, None].expand(-1, logits.shape[1]).contiguous()
        distribution.scatter_(1, self.ids[chosen], self.z[chosen])
        logits[rows] = distribution.to(logits.device)


@torch.inference_mode()
def plant(logits: torch.Tensor, segments: Sequence[Segment]) -> None:
    """Overwrite the rows of a forward's logits that have planted ones, as the native step does.

    Args:
        logits: fp32 [wanted rows, vocabulary].
        segments: the forward's.
    """
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
