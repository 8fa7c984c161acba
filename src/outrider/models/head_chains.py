"""Heads beside a target, whose drafts are chains where Python processes logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from math import isfinite

import torch

from ..base.config import NO_RECIPES, Recipe
from ..errors import ModelError
from ..sampling.shared_noise import Noise
from .base import Store
from .decide import DraftInput, DraftNodes, SampleInput, Samples, sample_in_python
from .native_model import NativeModel, PythonDraft
from .rows import Segment


def head_recipe(quantization: str | None) -> Recipe | None:
    """Return the recipe of a head's matrices: int8-a8 for "auto", None to leave them."""
    if quantization == "auto":
        return Recipe.parse("int8-a8")
    return None if quantization in (None, *NO_RECIPES) else Recipe.parse(str(quantization))


class HeadModel(NativeModel):
    """A model whose rows begin with states."""

    @abstractmethod
    def _draft_pass(self, store: Store, segment: Segment) -> tuple[torch.Tensor, Segment | None]:
        """Return the logits of a pass, a row for each next depth, and the segment that follows.

        It follows by its state; None where one pass is all.
        """

    def _states(self, segments: Sequence[Segment]) -> torch.Tensor | None:
        states = [segment.states for segment in segments if segment.states is not None]
        if len(states) != len(segments):
            raise ModelError("a row of a head begins with no state.")
        return states[0] if len(states) == 1 else torch.cat(states)

    def _in_python(self, store: Store, needs_logits: bool) -> PythonDraft:
        return partial(self._draft_chains, store)

    def _draft_chains(
        self,
        store: Store,
        segments: Sequence[Segment],
        inputs: Sequence[DraftInput | None],
        noise: Noise,
    ) -> list[DraftNodes]:
        return [
            DraftNodes.chain([] if asked is None else self._chain(store, segment, asked, noise))
            for segment, asked in zip(segments, inputs, strict=True)
        ]

    def _chain(self, store: Store, segment: Segment, asked: DraftInput, noise: Noise) -> list[int]:
        """Return the tokens drawn one behind the other; fewer where nothing is left to draw."""
        drafted: list[int] = []
        depth, following = asked.limits.depth, segment
        position = segment.start + len(segment.tokens)
        while len(drafted) < depth:
            logits, more = self._draft_pass(store, following)
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
