"""The target as teacher: its hidden states and logits along samples, from the step that serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import TrainingError
from ..models.base import Model
from ..models.rows import Segment
from .samples import Sample

ROWS = 512
"""Rows of a forward."""
PAGE_SIZE = 16


@dataclass(frozen=True)
class Lesson:
    """The states and logits of a target along a sample of n tokens, m of which it said itself.

    ``rows`` int64 [m] are the positions behind which those tokens were said. ``hidden`` is fp32
    [layers, n, width]. ``logits`` fp32 [m, ids] are those of the ids that a drafter knows,
    ``total`` fp32 [m] the logarithm of the sum of exp over all ids, and ``best`` int64 [m] the
    likeliest id.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor
    total: torch.Tensor
    best: torch.Tensor

    def log_probabilities(self) -> torch.Tensor:
        """Return log p of the ids that a drafter knows, [m, ids]; they need not sum to 1."""
        return self.logits - self.total[:, None]


class Teacher:
    """Runs a target over samples of up to ``context`` tokens, one at a time.

    ``layers`` are those whose outputs are wanted, -1 for the embedding; ``ids`` int64 those whose
    logits are, None for all.
    """

    def __init__(
        self, model: Model, context: int, layers: Sequence[int], ids: NDArray[np.int64] | None
    ) -> None:
        self.model, self.context, self.layers = model, context, tuple(layers)
        self._ids = None if ids is None else torch.from_numpy(ids)
        pages = -(-context // PAGE_SIZE)
        self._pages, self._store = range(pages), model.new_store(pages, PAGE_SIZE)

    def teach(self, sample: Sample) -> Lesson:
        """Return what the target says along a sample. Raises TrainingError: it is not finite."""
        tokens = sample.tokens[: self.context].tolist()
        said = np.flatnonzero(sample.said[1 : len(tokens)])
        first = int(said[0]) if len(said) else len(tokens)
        hidden: list[list[NDArray[np.float32]]] = [[] for _ in self.layers]
        logits: list[torch.Tensor] = []
        totals: list[torch.Tensor] = []
        best: list[torch.Tensor] = []
        for start in range(0, len(tokens), ROWS):
            part = tokens[start : start + ROWS]
            wanted = min(len(part), max(0, start + len(part) - first))
            segment = Segment(part, start, self._pages, wanted, len(tokens), key="lesson")
            output = self.model.run([segment], self._store, self.layers)
            for each, layer in zip(hidden, self.layers, strict=True):
                each.append(output.hidden[layer])
            if output.logits is None:
                continue
            begin = start + len(part) - wanted
            rows = said[(said >= begin) & (said < start + len(part))] - begin
            z = torch.from_numpy(output.logits)[torch.from_numpy(rows)]
            logits.append(z if self._ids is None else z[:, self._ids])
            totals.append(z.logsumexp(-1))
            best.append(z.argmax(-1))
        total = torch.cat(totals) if totals else torch.empty(0)
        if not torch.isfinite(total).all():
            raise TrainingError(
                "the target's logits are not finite along a sample; check its checkpoint."
            )
        width = 0 if self._ids is None else len(self._ids)
        states = [torch.from_numpy(np.concatenate(each)) for each in hidden]
        return Lesson(
            torch.tensor(tokens),
            torch.from_numpy(said),
            torch.stack(states) if states else torch.empty(0, len(tokens), 0),
            torch.cat(logits) if logits else torch.empty(0, width),
            total,
            torch.cat(best) if best else torch.empty(0, dtype=torch.int64),
        )
