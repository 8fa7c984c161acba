"""Outrider's own switch of drafting, ``/v1/speculation``."""

from __future__ import annotations

from typing import Any, TypeGuard

from ....base.limits import LARGEST_DRAFT
from ....base.outside.http import call
from ....base.outside.text import printable
from ....errors import EndpointError
from ..policy import GuardedServer
from ..states import Drafting
from .base import SwitchError

PATH = "/v1/speculation"


class Speculation:
    """Reads and sets how an Outrider server drafts."""

    def __init__(self, server: GuardedServer) -> None:
        self._server = server
        self._url = server.url.rstrip("/").removesuffix("/v1") + PATH

    def read(self) -> Drafting:
        """Return how it drafts now. Raises SwitchError: it does not answer, or is starting."""
        state = self._ask(None)
        length, in_use = (state.get(x) for x in ("num_speculative_tokens", "draft_length"))
        if not isinstance(state.get("enabled"), bool):
            raise SwitchError(f"{self._url}: the engine is starting.")
        return Drafting(
            state["enabled"],
            length if _is_length(length) else None,
            in_use if _is_length(in_use) else 0,
        )

    def set(self, body: dict[str, Any]) -> None:
        """Set the fields of ``body``; what is left out stays.

        Raises SwitchError: it does not answer, or refuses.
        """
        self._ask(body)

    def _ask(self, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            answer = call(self._url, body, key=self._server.key)
        except EndpointError as error:
            raise SwitchError(f"The switch {PATH}: {error}") from None
        document = answer.json()
        if not answer.ok or not isinstance(document, dict):
            told = document.get("error", {}) if isinstance(document, dict) else {}
            said = printable(told.get("message") or "") if isinstance(told, dict) else ""
            raise SwitchError(
                f"{self._url} answers HTTP {answer.status}{f': {said}' * bool(said)}."
            )
        return document


def _is_length(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is a draft length that this switch accepts."""
    return type(value) is int and 0 <= value <= LARGEST_DRAFT
