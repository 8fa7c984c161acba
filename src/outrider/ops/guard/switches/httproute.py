"""Weights of an HTTPRoute of the Gateway API: they alone are changed."""

from __future__ import annotations

from typing import Any

from ....base.outside.http import SECONDS as USUAL
from ....base.outside.http import Answer
from ....base.outside.sockets import Deadline
from ....errors import EndpointError
from ..kubernetes import CONFLICT, INVALID, Cluster, reason
from ..policy import Traffic
from ..states import Weights
from .base import SwitchError, weight

TRIES = 5
SECONDS = 10.0
"""Longest time of a change with all its tries."""
PATCH = "application/json-patch+json"
Place = tuple[str, int, bool]
"""A path in the route, the weight there, and whether it is written out."""


class HTTPRoute:
    """Sets the weights of two backends in every rule that names both.

    The patch names the version that was read, so a change by others in between is a conflict; it is
    then read and tried again.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._cluster = Cluster(traffic.url, traffic.key_env)
        self._names = (traffic.engine, traffic.standby)
        self._path = (
            f"/apis/gateway.networking.k8s.io/v1/namespaces/{traffic.namespace}"
            f"/httproutes/{traffic.route}"
        )

    def read(self) -> Weights:
        """Return the weights in force; rules that differ are an error."""
        weights = {(engine[1], standby[1]) for engine, standby in self._places(self._get())}
        if len(weights) > 1:
            raise SwitchError(f"{self._path}: its rules have different weights; make them equal.")
        return weights.pop()

    def set(self, weights: Weights) -> None:
        """Put weights into force."""
        deadline = Deadline(SECONDS)
        for _ in range(TRIES):
            route = self._get(deadline)
            answer = self._ask(self._patch(route, weights), "PATCH", deadline)
            if answer.ok:
                return
            if answer.status not in (CONFLICT, INVALID):
                break
        raise SwitchError(f"{self._path} cannot be changed ({reason(answer)}).")

    def _patch(self, route: dict[str, Any], weights: Weights) -> list[dict[str, Any]]:
        metadata = route.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if not isinstance(version, str):
            raise SwitchError(f"{self._path} is not an HTTPRoute: it has no version.")
        steps: list[dict[str, Any]] = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": version}
        ]
        for pair in self._places(route):
            for (path, _, written), name, given in zip(pair, self._names, weights, strict=True):
                steps.append({"op": "test", "path": f"{path}/name", "value": name})
                op = "replace" if written else "add"
                steps.append({"op": op, "path": f"{path}/weight", "value": given})
        return steps

    def _places(self, route: dict[str, Any]) -> list[tuple[Place, Place]]:
        """Return where the weights of both stand, rule by rule."""
        pairs = []
        try:
            for i, rule in enumerate(route["spec"]["rules"]):
                places = {
                    each["name"]: (
                        f"/spec/rules/{i}/backendRefs/{j}", _weight(each), "weight" in each,
                    )
                    for j, each in enumerate(rule.get("backendRefs") or [])
                }  # fmt: skip
                if all(name in places for name in self._names):
                    pairs.append((places[str(self._names[0])], places[str(self._names[1])]))
        except (LookupError, TypeError, ValueError, AttributeError):
            raise SwitchError(f"{self._path} is not an HTTPRoute.") from None
        if not pairs:
            names = " and ".join(map(str, self._names))
            raise SwitchError(
                f"{self._path}: no rule has the backends {names}; correct the policy."
            )
        return pairs

    def _get(self, deadline: Deadline | None = None) -> dict[str, Any]:
        answer = self._ask(deadline=deadline)
        document = answer.json()
        if not answer.ok or not isinstance(document, dict):
            raise SwitchError(f"{self._path} cannot be read ({reason(answer)}).")
        return document

    def _ask(
        self, body: Any = None, method: str | None = None, deadline: Deadline | None = None
    ) -> Answer:
        try:
            left = USUAL if deadline is None else min(USUAL, deadline.left())
            return self._cluster.ask(self._path, body, method=method, kind=PATCH, seconds=left)
        except (EndpointError, TimeoutError) as error:
            raise SwitchError(f"Kubernetes: {error}") from None


def _weight(reference: dict[str, Any]) -> int:
    """Return the weight of a backend; 1 if it is missing or null."""
    written = reference.get("weight")
    return 1 if written is None else weight(written)
