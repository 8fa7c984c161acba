"""The states of sequences in layers without attention, as torch's forward keeps them.

States cover committed tokens only. Of a draft's rows the inputs are kept: the next step takes in
those of accepted rows, and forgets the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..errors import ModelError
from .rows import Segment

Tensors = tuple[torch.Tensor, ...]
Advance = Callable[[Tensors, Tensors], tuple[torch.Tensor, Tensors]]
"""Takes a state and the inputs of some rows; returns the output by row, and the next state."""


UNIT = 64
"""Numbers are padded to a multiple of this, so that none is in the tail of torch's loops."""


def alike(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return ``function`` of each number of x, with bits that do not depend on the others.

    Torch rounds some functions differently for the last numbers, if they fill no vector.
    """
    flat = x.flatten()
    return function(F.pad(flat, (0, -len(flat) % UNIT)))[: len(flat)].view(x.shape)


@dataclass
class SequenceStates:
    """States by layer after the first ``position`` tokens, and inputs of the rows that follow."""

    position: int = 0
    states: dict[int, Tensors] = field(default_factory=dict)
    inputs: dict[int, Tensors] = field(default_factory=dict)
    drafted: int = 0


@dataclass(frozen=True)
class Walk:
    """The rows of one sequence in a forward: ``committed`` ones from ``first`` on, then a draft.

    The ``accepted`` rows of the draft in ``before`` are taken in first; ``after`` is the result.
    """

    before: SequenceStates
    after: SequenceStates
    accepted: int
    first: int
    committed: int


class Walks:
    """The walks of one forward; ``commit`` keeps the states that they compute."""

    def __init__(self, kept: dict[str, SequenceStates], segments: Sequence[Segment]) -> None:
        self._kept, self._keys = kept, [segment.key for segment in segments]
        self._walks: list[Walk] = []
        first = 0
        for segment in segments:
            before = kept.get(segment.key) if segment.start else None
            before = before or SequenceStates()
            accepted = segment.start - before.position
            if not 0 <= accepted <= before.drafted:
                raise ModelError(
                    f"sequence {segment.key!r} goes on at {segment.start}, but its state is behind "
                    f"{before.position} tokens and {before.drafted} drafted ones."
                )
            committed = len(segment.tokens)
            after = SequenceStates(segment.start + committed, drafted=len(segment.nodes))
            self._walks.append(Walk(before, after, accepted, first, committed))
            first += committed + after.drafted

    def run(self, layer: int, inputs: Tensors, zero: Tensors, advance: Advance) -> torch.Tensor:
        """Return a layer's output for the rows of ``inputs``; zeros for padding rows.

        A new sequence begins with the state ``zero``.
        """
        out: torch.Tensor | None = None
        for walk in self._walks:
            state = walk.before.states.get(layer, zero)
            if walk.accepted:
                accepted = tuple(each[: walk.accepted] for each in walk.before.inputs[layer])
                _, state = advance(state, accepted)
            middle = walk.first + walk.committed
            made, state = advance(state, tuple(each[walk.first : middle] for each in inputs))
            if out is None:
                out = made.new_zeros(len(inputs[0]), *made.shape[1:])
            out[walk.first : middle] = made
            drafted = tuple(each[middle : middle + walk.after.drafted].clone() for each in inputs)
            if walk.after.drafted:
                out[middle : middle + walk.after.drafted] = advance(state, drafted)[0]
            walk.after.states[layer] = tuple(each.clone() for each in state)
            walk.after.inputs[layer] = drafted
        assert out is not None
        return out

    def commit(self) -> None:
        """Keep the states that all layers have computed."""
        self._kept.update(zip(self._keys, (walk.after for walk in self._walks), strict=True))


def convolved(
    past: torch.Tensor, rows: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the convolution of rows [n, width] after ``past`` ones [taps - 1, width].

    ``taps`` [taps, width] begin with the oldest row's. Also return the new past rows.
    """
    line = torch.cat((past, rows))
    mixed = line[: len(rows)] * taps[0]
    for tap in range(1, len(taps)):
        mixed = mixed + line[tap : tap + len(rows)] * taps[tap]
    return mixed if bias is None else mixed + bias, line[len(rows) :]


def short_conv(
    walks: Walks,
    layer: int,
    gates: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return a short convolution over each sequence's rows: [padded rows, width] (LFM2).

    ``gates`` [padded rows, 3 * width] are the factors of its inputs, the factors of its sums, and
    the inputs.
    """
    before, behind, inputs = gates.chunk(3, -1)
    gated = before * inputs

    def advance(state: Tensors, rows: Tensors) -> tuple[torch.Tensor, Tensors]:
        mixed, past = convolved(state[0], rows[0], taps, bias)
        return mixed, (past,)

    zero = gated.new_zeros(len(taps) - 1, gated.shape[1])
    return walks.run(layer, (gated,), (zero,), advance) * behind
