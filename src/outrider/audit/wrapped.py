"""A sequence's logits pipeline with something around it."""

from __future__ import annotations

from typing import Any

from ..types import Lawgiving


class WrappedLaw:
    """Passes every call on to ``law``; without a handle it is always called from Python."""

    native_handle = 0

    def __init__(self, law: Lawgiving) -> None:
        self._law = law
        self.has_grammar, self.penalises = law.has_grammar, law.penalises

    @property
    def error(self) -> str | None:
        """Why rows are NaN after the last call of ``apply``."""
        return self._law.error

    def apply(self, logits: Any, tokens: list[int], paths: list[list[int]]) -> Any:
        """Process logits, see ``SequenceLaw.apply``."""
        return self._law.apply(logits, tokens, paths)

    def masks(self, tokens: list[int], paths: Any) -> list[Any]:
        """Return what the grammar lets come, see ``SequenceLaw.masks``."""
        return self._law.masks(tokens, paths)

    def fit(
        self, tokens: list[int], nodes: list[int], parents: list[int], length: int
    ) -> tuple[list[int], list[int]]:
        """Cut a draft where the grammar refuses it, see ``SequenceLaw.fit``."""
        return self._law.fit(tokens, nodes, parents, length)
