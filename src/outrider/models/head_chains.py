"""Drafts of heads whose logits Python processes: chains, whatever the limits allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch

from ..cache.store import Store
from ..sampling.shared_noise import Noise
from .decide import DraftInput, DraftNodes, SampleInput, Samples, sample_in_python
from .rows import Segment

Passes = Callable[[Segment], tuple[torch.Tensor, Segment | None]]
"""Returns the logits of a pass, a row for each next depth, and, by its state, the segment that
follows; None where one pass is all."""


class HeadChains:
    """Mixed into a native head before ``NativeTransformer``, whose drafts run whole models."""

    def _passes(self, store: Store) -> Passes:
        """Return the head's passes on its cache."""
        raise NotImplementedError

    def _in_python(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool,
    ) -> list[DraftNodes]:
        """Return a chain behind each segment that something is drafted behind."""
        passes = self._passes(store)
        return [
            DraftNodes([], []) if asked is None else _chain(passes, segment, asked, noise)
            for segment, asked in zip(segments, inputs, strict=True)
        ]


def _chain(passes: Passes, segment: Segment, asked: DraftInput, noise: Noise) -> DraftNodes:
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
            found = sample_in_python(raw, [one], [wish], [0], noise)
            if not isfinite(found.scores[0]):
                return _nodes(drafted)
            drafted.append(found.tokens[0])
        if more is None:
            break
        following = more._replace(tokens=drafted[-1:], start=position + len(drafted) - 1)
    return _nodes(drafted)


def _nodes(tokens: list[int]) -> DraftNodes:
    return DraftNodes(tokens, [*range(-1, len(tokens) - 1)])
