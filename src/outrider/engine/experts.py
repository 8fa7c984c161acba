"""The number of experts that the rows of a step use, and the cost of reading them."""

from __future__ import annotations

from ..checkpoints.architecture import Architecture
from .control.costs import ExpertCosts

SMOOTHING = 0.02
"""Weight of the newest step in a running mean."""


class ExpertUnions:
    """Running means of the number of experts that a layer reads in a step, by the step's rows.

    Row counts are grouped by powers of two: 1, 2 to 3, 4 to 7 and so on. A layer reads each expert
    that any row uses, and n unrelated rows use nearly n times as many as one row does: drafted
    rows cost more the fewer experts they share.
    """

    def __init__(self, shape: Architecture) -> None:
        self._layers = shape.sparse.count(True)
        self._means: dict[int, float] = {}

    def take(self, rows: int, read: int) -> float:
        """Take in a step of ``rows`` rows that ``read`` that many experts, in all layers together.

        Returns the mean number per layer with experts.
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
    """Return what a mixture's experts cost, from the weights that a step reads; None if dense."""
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
