"""Drafts of heads whose logits Python processes: chains, whatever the limits allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch

from ..errors import ModelError
from ..sampling.shared_noise import Noise
from .decide import DraftInput, DraftNodes, SampleInput, Samples, sample_in_python
from .rows import Segment

Passes = Callable[[Segment], tuple[torch.Tensor, Segment | None]]
"""Returns the logits of a pass, a row for each next depth, and, by its state, the segment that
follows; None where one pass is all."""


def states_of(segments: Sequence[Segment]) -> torch.Tensor:
    """Return the states of all segments."""
    states = [segment.states for segment in segments if segment.states is not None]
    if len(states) != len(segments):
        raise ModelError("a row of a head begins with no state.")
    return states[0] if len(states) == 1 else torch.cat(states)


def draft_chains(
    passes: Passes, segments: Sequence[Segment], inputs: Sequence[DraftInput | None], noise: Noise
) -> list[DraftNodes]:
    """Return a chain behind each segment that something is drafted behind."""
    chains = (
        [] if asked is None else _chain(passes, segment, asked, noise)
        for segment, asked in zip(segments, inputs, strict=True)
    )
    return [DraftNodes(tokens, [*range(-1, len(tokens) - 1)]) for tokens in chains]


def _chain(passes: Passes, segment: Segment, asked: DraftInput, noise: Noise) -> list[int]:
    """Return the tokens drawn one behind the other; fewer where nothing is left to draw."""
    drafted: list[int] = []
    depth, following = asked.limits.depth, segment
    position = segment.start + len(segment.tokens)
    while len(drafted) < depth:
        logits, more = passes(following)
        for line in logits[: depth - len(drafted)]:
            wish = SampleInput(asked.sequence, True, drafted=[*drafted])
            one = segment._replace(logits=1, nodes=(), parents=())
            raw = Samples([0], [0.0], line[None])
            drawn = sample_in_python(raw, [one], [wish], [0], noise)
            if not isfinite(drawn.scores[0]):
                return drafted
            drafted.append(drawn.tokens[0])
        if more is None:
            break
        following = more._replace(tokens=drafted[-1:], start=position + len(drafted) - 1)
    return drafted
