"""The common part of switches: their errors, and the weights that they report."""

from __future__ import annotations

from typing import Any, Protocol

from ....errors import OutriderError
from ..states import Weights


class SwitchError(OutriderError):
    """A switch does not answer, or refuses; nothing is known of what it did."""


class TrafficSwitch(Protocol):
    """Divides traffic between engine and standby by weights."""

    def read(self) -> Weights:
        """Return the weights in force. Raises SwitchError: it does not answer."""
        ...

    def set(self, weights: Weights) -> None:
        """Put weights into force. Raises SwitchError: it does not answer, or refuses."""
        ...


LARGEST_WEIGHT = 1_000_000
"""The largest weight that Kubernetes accepts."""


def weight(value: Any) -> int:
    """Return a weight that a switch reports. Raises ValueError: it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a weight is a number")
    if not 0 <= value <= LARGEST_WEIGHT or value != int(value):
        raise ValueError("a weight is a whole number")
    return int(value)
