"""The target's hidden states along samples, kept as it answers so that training computes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ..base.types import StepRecord
from ..checkpoints.dtypes import Array
from ..checkpoints.files import Entry

HIDDEN, KNOWN = "hidden", "known"
"""The tensors of a file of states: [tokens, width], and for each sample whether it has any."""
BF16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
TYPES = {"BF16": BF16, "F32": FP32}
"""The types of states, by their names in files; logits are computed from the last layer's fp32."""


def usual_layers(count: int) -> tuple[int, int, int]:
    """Return the layers of a target whose outputs a new head reads: early, middle and late.

    EAGLE-3 takes what enters layers 2, n / 2 and n - 3. All three differ, as ``speculators`` wants.
    """
    if count >= 7:
        return 1, count // 2 - 1, count - 4
    return 0 if count > 2 else -1, (count - 1) // 2, count - 1


def kept_layers(count: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the layers whose outputs are kept: those ``wanted``, and the last, for the logits.

    By default the layers of a new head are wanted.
    """
    return tuple(sorted({*(wanted or usual_layers(count)), count - 1}))


def state_bytes(layers: Sequence[int], width: int) -> int:
    """Return the bytes of a token's states after ``layers``, one of which is the last."""
    return (BF16.itemsize * (len(layers) - 1) + FP32.itemsize) * width if layers else 0


class States(Protocol):
    """The states of a sample after some layers."""

    @property
    def layers(self) -> Sequence[int]:
        """The layers, -1 for the embedding."""

    def read(self, layer: int, count: int) -> Array:
        """Return the states of the first ``count`` tokens, bf16 or fp32 [count, width].

        The last token of a sample has zeros: nothing follows it, so it was never run.
        """


@dataclass(frozen=True)
class HeldStates:
    """States in memory, by layer bf16 or fp32 [tokens or one less, width]."""

    by_layer: Mapping[int, Array]

    @property
    def layers(self) -> Sequence[int]:
        """See ``States``."""
        return [*self.by_layer]

    def read(self, layer: int, count: int) -> Array:
        """See ``States``."""
        rows = self.by_layer[layer][:count]
        whole = np.zeros((count, rows.shape[1]), rows.dtype)
        whole[: len(rows)] = rows
        return whole


class StoredStates(NamedTuple):
    """States in files, by layer; a sample's begin with row ``first``."""

    entries: Mapping[int, Entry]
    first: int

    @property
    def layers(self) -> Sequence[int]:
        """See ``States``."""
        return [*self.entries]

    def read(self, layer: int, count: int) -> Array:
        """See ``States``. Raises ModelError: the file was changed."""
        entry = self.entries[layer]
        rows = np.empty((count, entry.shape[1]), TYPES[entry.type])
        octets = rows.view(np.uint8).reshape(-1)
        entry.file.fill(octets, entry.begin + self.first * rows.strides[0])
        return rows


class StateTap:
    """Keeps the states of sequences as an engine decodes them, with any drafter.

    The engine must not share prefixes, so that it runs every row of each sequence. The greatest of
    ``layers`` is the target's last.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.target_layers = tuple(layers)
        self._parts: dict[str, list[list[Array]]] = {}
        self._counts: dict[str, int] = {}

    def observe(self, record: StepRecord) -> None:
        """Keep the states of a step's committed rows."""
        states = record.states
        assert states is not None
        rows: list[int] = []
        ends: list[int] = []
        batch = record.plan.batch
        for item, path, first in zip(batch, record.verdict.path, states.first, strict=True):
            rows += range(first, first + item.count)
            rows += [first + item.count + node for node in path]
            ends.append(len(rows))
        last = max(self.target_layers)
        taken: list[Array] = [
            states.layers[i][rows].astype(FP32 if i == last else BF16, copy=False)
            for i in self.target_layers
        ]
        begin = 0
        for item, end in zip(batch, ends, strict=True):
            name = item.sequence.id
            if item.start == 0:  # its first rows, or recomputed ones
                self._parts[name], self._counts[name] = [], 0
            if self._counts.get(name) == item.start:
                self._parts[name].append([each[begin:end] for each in taken])
                self._counts[name] += end - begin
            begin = end

    def take(self, request: str, tokens: int) -> HeldStates | None:
        """Return the states of a request of ``tokens`` tokens, and forget them.

        None if any is missing, except the last token's.
        """
        name = f"{request}/0"
        parts, count = self._parts.pop(name, []), self._counts.pop(name, 0)
        if not parts or count < tokens - 1:
            return None
        whole = map(np.concatenate, zip(*parts, strict=True))
        return HeldStates(dict(zip(self.target_layers, whole, strict=True)))
