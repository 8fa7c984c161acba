"""The experts of a mixture that the rows of a step wake: how many, and what they cost."""

from __future__ import annotations

from ..checkpoints.architecture import Architecture
from .control.costs import ExpertCosts

SMOOTHING = 0.02
"""What a step counts in the mean of its size."""


class ExpertUnions:
    """Running means of the experts that a layer reads in a step, by the step's rows.

    Rows are told apart by powers of two: 1, 2 to 3, 4 to 7 and so on. Rows that are strangers to
    each other wake nearly as many experts as they are times as many as one does, and each of them
    is read: so drafted rows cost more the less they share.
    """

    def __init__(self, shape: Architecture) -> None:
        self._layers = shape.sparse.count(True)
        self._means: dict[int, float] = {}

    def take(self, rows: int, read: int) -> float:
        """Take in a step of ``rows`` rows that read so many experts, of all layers together.

        Returns how many those are of a layer.
        """
        size, each = rows.bit_length(), read / self._layers
        mean = self._means.get(size, each)
        self._means[size] = mean + SMOOTHING * (each - mean)
        return each

    def summary(self) -> dict[str, float]:
        """Return the means by rows, as JSON."""
        return {
            _span(1 << (size - 1), (1 << size) - 1): round(mean, 2)
            for size, mean in sorted(self._means.items())
        }


def expert_costs(shape: Architecture) -> ExpertCosts | None:
    """Return what a mixture's experts cost, by the numbers that a step reads; None without one."""
    mixture = shape.mixture
    if mixture is None:
        return None
    a, hidden = shape, shape.hidden_size
    gates = 1 if a.layout.ungated else 2
    layers, expert = a.sparse.count(True), (gates + 1) * mixture.width * hidden
    heads = 2 * (a.num_heads + a.num_kv_heads) * a.head_dim * hidden * len(a.attending)
    dense = (gates + 1) * a.intermediate_size * hidden * (sum(a.mlps) - layers)
    shared = (gates + 1) * mixture.shared * hidden + mixture.experts * hidden
    always = heads + dense + layers * shared + a.vocab_size * hidden
    one = layers * expert
    return ExpertCosts(mixture.experts, mixture.top, one / (always + mixture.top * one))


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
