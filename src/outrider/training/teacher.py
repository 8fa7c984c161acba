"""Runs the target as a teacher: its hidden states and logits along samples, as it is served."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from ..base.config import free_memory
from ..errors import TrainingError
from ..models.base import Model
from ..models.native import NativeTransformer
from ..models.native_output import NativeOutput
from ..models.rows import Segment
from .samples import Sample
from .states import FP32, States

ROWS = 512
"""Rows of a forward pass."""
PAGE_SIZE = 16
ROOM = 0.4
"""Most memory for lessons, as a share of what is free."""
NEAR = 0.05
"""Largest difference of kept states from those that the target computes, relative to their norm."""
KNOWN_IDS = 128
"""Number of likeliest ids whose probabilities are kept, for each distribution."""


@dataclass(frozen=True)
class Lesson:
    """The states and distributions of a target along a sample of n tokens, of which it said m.

    ``rows`` int64 [m] are the positions before those tokens, and ``best`` int64 [m] the likeliest
    ids there. ``ids`` int32 and ``log_p`` fp16, [m, ``KNOWN_IDS`` or fewer], are the likeliest of
    those that a drafter knows, in the drafter's numbers, likeliest first. ``hidden`` is bf16
    [layers, n, width].
    """

    tokens: Tensor
    rows: Tensor
    hidden: Tensor
    ids: Tensor
    log_p: Tensor
    best: Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(each.nbytes for each in vars(self).values())

    def to(self, device: torch.device) -> Lesson:
        """Return the lesson with its tensors on a device."""
        return Lesson(**{name: each.to(device) for name, each in vars(self).items()})


class Teacher:
    """Runs a target over samples of up to ``context`` tokens, one at a time.

    ``layers`` are those whose outputs are wanted, -1 for the embedding. ``ids`` int64 are those
    that a drafter knows, None for all. Up to ``room`` bytes of lessons are kept for later epochs,
    in main memory, where the target also runs. If ``stored``, the states that samples come with are
    used; those of the first such sample must match what the target computes.
    """

    def __init__(
        self, model: Model, context: int, layers: Sequence[int], ids: NDArray[np.int64] | None,
        room: int = 0, stored: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.context, self.layers = model, context, tuple(layers)
        self._ids = None if ids is None else torch.from_numpy(ids)
        pages = -(-context // PAGE_SIZE)
        self._pages, self._store = range(pages), model.new_store(pages, PAGE_SIZE)
        self._room, self._kept = room, dict[tuple[bytes, bytes], Lesson]()
        self._output = NativeOutput(model) if stored and type(model) is NativeTransformer else None
        self._proved = self._told = False

    def teach(self, sample: Sample) -> Lesson:
        """Return the lesson of a sample on torch's default device.

        Raises TrainingError: logits are not finite.
        """
        key = sample.tokens.tobytes(), sample.said.tobytes()
        lesson = self._kept.get(key)
        if lesson is None:
            with torch.device("cpu"), torch.autocast("cpu", enabled=False):
                lesson = self._taught(sample)
            if lesson.nbytes <= self._room:
                self._room -= lesson.nbytes
                self._kept[key] = lesson
        return lesson.to(torch.get_default_device())

    def _taught(self, sample: Sample) -> Lesson:
        """Return the lesson of a sample, from its stored states if they can be used."""
        tokens = sample.tokens[: self.context].tolist()
        said = np.flatnonzero(sample.said[1 : len(tokens)])
        if self._output is not None and sample.states is not None:
            last = self.model.hidden_layers - 1
            if not {*self.layers, last} <= {*sample.states.layers}:
                self._say_other_layers(sample.states)
            else:
                self._prove(sample.states, tokens)
                return self._read(self._output, sample.states, tokens, said)
        first = int(said[0]) if len(said) else len(tokens)
        hidden: list[list[Tensor]] = [[] for _ in self.layers]
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(tokens), ROWS):
            part = tokens[start : start + ROWS]
            wanted = min(len(part), max(0, start + len(part) - first))
            segment = Segment(part, start, self._pages, wanted, len(tokens), key="lesson")
            output = self.model.run([segment], self._store, self.layers)
            for each, layer in zip(hidden, self.layers, strict=True):
                each.append(torch.from_numpy(output.hidden[layer]).bfloat16())
            if output.logits is not None:
                begin = start + len(part) - wanted
                rows = said[(said >= begin) & (said < start + len(part))] - begin
                logits = torch.from_numpy(output.logits)
                parts.append(self._likeliest(logits if len(rows) == wanted else logits[rows]))
        return self._lesson(tokens, said, [torch.cat(each) for each in hidden], parts)

    def _say_other_layers(self, states: States) -> None:
        """Say once that kept states are of other layers."""
        if not self._told:
            self._told = True
            tqdm.write(
                f"the states beside the samples are of layers {', '.join(map(str, states.layers))};"
                f" {', '.join(map(str, self.layers))} are read, and so computed anew",
                file=sys.stderr,
            )

    def _lesson(
        self, tokens: list[int], said: NDArray[np.int64], states: Sequence[Tensor],
        parts: list[tuple[Tensor, Tensor, Tensor]],
    ) -> Lesson:  # fmt: skip
        """Return a lesson from ``states`` by layer, and from what ``_likeliest`` returned."""
        if not parts:
            parts.append(self._likeliest(torch.empty(0, self.model.shape.vocab_size)))
        ids, log_p, best = (torch.cat(each) for each in zip(*parts, strict=True))
        return Lesson(
            torch.tensor(tokens), torch.from_numpy(said),
            torch.stack([*states]) if states else torch.empty(0, len(tokens), 0),
            ids, log_p, best,
        )  # fmt: skip

    def _read(
        self, output: NativeOutput, states: States, tokens: list[int], said: NDArray[np.int64]
    ) -> Lesson:
        """Return the lesson of a sample whose states are kept."""
        count, last = len(tokens), self.model.hidden_layers - 1
        rows = states.read(last, count)[said].astype(np.float32, copy=False)
        parts = [
            self._likeliest(torch.from_numpy(output.logits(rows[begin : begin + ROWS])))
            for begin in range(0, len(rows), ROWS)
        ]
        return self._lesson(tokens, said, [_tensor(states, i, count) for i in self.layers], parts)

    def _prove(self, states: States, tokens: list[int]) -> None:
        """Raise TrainingError: kept states are not those that the target computes."""
        if self._proved:
            return
        count, last = min(len(tokens) - 1, ROWS), self.model.hidden_layers - 1
        segment = Segment(tokens[:count], 0, self._pages, 0, len(tokens), key="lesson")
        computed = torch.from_numpy(self.model.run([segment], self._store, [last]).hidden[last])
        widths = {states.read(layer, 1).shape[1] for layer in (*self.layers, last)}
        off = 1.0
        if widths == {computed.shape[1]}:
            difference = _tensor(states, last, count).float() - computed
            off = float(difference.norm() / computed.norm())
        if not off <= NEAR:  # true for NaN
            raise TrainingError(
                f"the states beside the samples differ from the target's by {off:.0%}; give the "
                "target that they are of, or write the data again."
            )
        self._proved = True

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``ids``, ``log_p`` and ``best`` of a lesson for rows of logits."""
        total = logits.logsumexp(-1, keepdim=True)
        if not torch.isfinite(total).all():
            raise TrainingError(
                "the target's logits are not finite along a sample; check its checkpoint."
            )
        known = logits if self._ids is None else logits[:, self._ids]
        top, ids = known.topk(min(KNOWN_IDS, known.shape[-1]), -1)
        return ids.int(), (top - total).half(), logits.argmax(-1)


def _tensor(states: States, layer: int, count: int) -> Tensor:
    """Return kept states as a tensor, bf16 [count, width]."""
    rows = states.read(layer, count)
    if rows.dtype == FP32:
        return torch.from_numpy(rows).bfloat16()
    return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)


def room_for_lessons() -> int:
    """Return the most bytes that lessons may take now."""
    return int(ROOM * free_memory())
