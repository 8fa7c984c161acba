"""A switch of one's own: GET tells the weights, POST sets them."""

from __future__ import annotations

from typing import Any

from ....base.outside.http import call
from ....errors import EndpointError
from ..policy import Traffic, key_in
from ..states import Weights
from .base import SwitchError, weight


class Webhook:
    """Speaks JSON, ``{"engine": 100, "standby": 0}``, both ways."""

    def __init__(self, traffic: Traffic) -> None:
        self._url = traffic.url or ""
        self._key = key_in(traffic.key_env)

    def read(self) -> Weights:
        """Return the weights in force."""
        said = self._ask(None)
        try:
            weights = weight(said["engine"]), weight(said["standby"])
        except (TypeError, LookupError, ValueError):
            raise SwitchError(f"{self._url} tells no weights of engine and standby.") from None
        return weights

    def set(self, weights: Weights) -> None:
        """Put weights into force."""
        self._ask({"engine": weights[0], "standby": weights[1]})

    def _ask(self, body: Any) -> Any:
        try:
            answer = call(self._url, body, key=self._key)
        except EndpointError as error:
            raise SwitchError(f"The webhook of traffic: {error}") from None
        if not answer.ok:
            raise SwitchError(f"{self._url} answers HTTP {answer.status}.")
        return answer.json()
