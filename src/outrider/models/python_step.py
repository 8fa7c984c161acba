"""The step of models that are not native: logits are processed and drafts drawn in Python.

It is the reference of the native step.
"""

from collections.abc import Sequence

import torch

from ..cache.store import Store
from ..sampling.shared_noise import Noise
from .base import Model
from .decide import DraftInput, DraftNodes, SampleInput, Samples, sample_in_python
from .planted import plant
from .rows import Segment
from .tree_draft import draft_in_python


class PythonStep(Model):
    """A model that has a forward, ``run``, and needs no more."""

    def decide(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[SampleInput | None],
        noise: Noise | None,
        hidden: Sequence[int] = (),
    ) -> Samples:
        output = self.run(segments, store, hidden)
        logits = output.logits
        if logits is None:
            logits = torch.empty(0, self.shape.vocab_size)
        plant(logits, segments)
        raw = Samples([0] * len(logits), [0.0] * len(logits), logits, hidden=output.hidden)
        return sample_in_python(raw, segments, inputs, range(len(inputs)), noise)

    def draft(
        self,
        segments: Sequence[Segment],
        store: Store,
        inputs: Sequence[DraftInput | None],
        noise: Noise,
        needs_logits: bool = False,
    ) -> list[DraftNodes]:
        return draft_in_python(self, store, needs_logits, segments, inputs, noise)
