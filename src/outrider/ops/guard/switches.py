"""The switches with which the guard changes traffic (by weights) and drafting."""

from __future__ import annotations

import re
from typing import Any

from ...base.fields import is_number
from ...base.limits import LARGEST_DRAFT
from ...base.outside.http import SECONDS, Answer, call
from ...base.outside.sockets import CHUNK, Deadline, connect, connect_unix, receive, send
from ...base.outside.text import printable
from ...errors import EndpointError, OutriderError
from .kubernetes import CONFLICT, INVALID, Cluster, reason
from .policy import GuardedServer, Policy, PolicyTraffic, key_in
from .states import DraftingState, Weights

LARGEST_WEIGHT = 1_000_000
"""The largest weight that Kubernetes accepts."""
HAPROXY_SECONDS = 3.0
HAPROXY_BYTES = 1 << 16
HAPROXY_WEIGHT = re.compile(r"^([0-9]{1,6}) \(initial [0-9]{1,6}\)$")
ROUTE_TRIES = 5
ROUTE_SECONDS = 10.0
"""Longest time to change a route, with all tries."""
PATCH = "application/json-patch+json"
SPECULATION = "/v1/speculation"
RoutePlace = tuple[str, int, bool]
"""A path in the route, the weight there, and whether it is written out."""


class SwitchError(OutriderError):
    """A switch does not answer, or refuses; what it did is unknown."""


def weight(value: Any) -> int:
    """Return a weight that a switch reports. Raises ValueError: it is not a weight."""
    if not is_number(value) or not 0 <= value <= LARGEST_WEIGHT or value != int(value):
        raise ValueError("a weight is a whole number")
    return int(value)


class HAProxy:
    """HAProxy's stats socket, which needs ``level admin``: weights of two servers of a backend."""

    def __init__(self, traffic: PolicyTraffic) -> None:
        self._address = traffic.address or ""
        self._servers = [f"{traffic.backend}/{name}" for name in (traffic.engine, traffic.standby)]

    def read(self) -> Weights:
        """Return the weights in force."""
        engine, standby = map(self._weight, self._servers)
        return engine, standby

    def set(self, weights: Weights) -> None:
        """Set the weights, the larger one first, so that one server always has traffic."""
        for new, server in sorted(zip(weights, self._servers, strict=True), reverse=True):
            if said := self._ask(f"set weight {server} {new}"):
                raise SwitchError(
                    f"HAProxy at {self._address} refuses a weight of {server}: {said}"
                )

    def _weight(self, server: str) -> int:
        said = self._ask(f"get weight {server}")
        match = HAPROXY_WEIGHT.match(said)
        if match is None:
            raise SwitchError(f"HAProxy at {self._address} has no weight of {server}: {said}")
        return int(match[1])

    def _ask(self, command: str) -> str:
        """Return HAProxy's answer to a command, on one line; each has its own connection."""
        kind, _, place = self._address.partition(":")
        host, _, port = place.rpartition(":")
        deadline = Deadline(HAPROXY_SECONDS)
        try:
            with (
                connect(host.strip("[]"), int(port), deadline) if kind == "tcp"
                else connect_unix(place, deadline)
            ) as connection:  # fmt: skip
                send(connection, f"{command}\n".encode(), deadline)
                said = b""
                while len(said) < HAPROXY_BYTES and (more := receive(connection, CHUNK, deadline)):
                    said += more
        except OSError as error:
            why = printable(error.strerror or error)
            raise SwitchError(f"HAProxy at {self._address} does not answer ({why}).") from None
        return printable(said.decode("utf-8", "replace"))


class HTTPRoute:
    """Weights of two backends in every rule of a Gateway API's route that names both.

    Only these weights are changed. The patch names the version that was read, so another change in
    between is a conflict; the route is then read and changed again.
    """

    def __init__(self, traffic: PolicyTraffic) -> None:
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
        deadline = Deadline(ROUTE_SECONDS)
        for _ in range(ROUTE_TRIES):
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

    def _places(self, route: dict[str, Any]) -> list[tuple[RoutePlace, RoutePlace]]:
        """Return the places of both weights, rule by rule; a missing or null weight is 1."""
        pairs = []
        try:
            for i, rule in enumerate(route["spec"]["rules"]):
                places = {
                    each["name"]: (
                        f"/spec/rules/{i}/backendRefs/{j}",
                        1 if each.get("weight") is None else weight(each["weight"]),
                        "weight" in each,
                    )
                    for j, each in enumerate(rule.get("backendRefs") or [])
                }
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
            left = SECONDS if deadline is None else min(SECONDS, deadline.left())
            return self._cluster.ask(self._path, body, method=method, kind=PATCH, seconds=left)
        except (EndpointError, TimeoutError) as error:
            raise SwitchError(f"Kubernetes: {error}") from None


class Webhook:
    """A custom switch that reads and writes JSON: ``{"engine": 100, "standby": 0}``."""

    def __init__(self, traffic: PolicyTraffic) -> None:
        self._url = traffic.url or ""
        self._key = key_in(traffic.key_env)

    def read(self) -> Weights:
        """Return the weights in force by GET."""
        said = self._ask(None)
        try:
            return weight(said["engine"]), weight(said["standby"])
        except (TypeError, LookupError, ValueError):
            raise SwitchError(f"{self._url} tells no weights of engine and standby.") from None

    def set(self, weights: Weights) -> None:
        """Set the weights by POST."""
        self._ask({"engine": weights[0], "standby": weights[1]})

    def _ask(self, body: Any) -> Any:
        try:
            answer = call(self._url, body, key=self._key)
        except EndpointError as error:
            raise SwitchError(f"The webhook of traffic: {error}") from None
        if not answer.ok:
            raise SwitchError(f"{self._url} answers HTTP {answer.status}.")
        return answer.json()


TrafficSwitch = HAProxy | HTTPRoute | Webhook
"""Divides traffic by weights; raises SwitchError if it does not answer or refuses."""
TRAFFIC_SWITCHES: dict[str, type[TrafficSwitch]] = {
    "haproxy": HAProxy,
    "httproute": HTTPRoute,
    "webhook": Webhook,
}


def traffic_switch(policy: Policy) -> TrafficSwitch | None:
    """Return the switch that a policy names; None if it names none."""
    kind = TRAFFIC_SWITCHES.get(policy.traffic.kind)
    return None if kind is None else kind(policy.traffic)


class SpeculationSwitch:
    """Outrider's own switch of drafting, ``/v1/speculation``."""

    def __init__(self, server: GuardedServer) -> None:
        self._server = server
        self._url = server.root + SPECULATION

    def read(self) -> DraftingState:
        """Return how it drafts now. Raises SwitchError: it does not answer, or is starting."""
        state = self._ask(None)
        length, in_use = (
            value if type(value) is int and 0 <= value <= LARGEST_DRAFT else None
            for value in (state.get("num_speculative_tokens"), state.get("draft_length"))
        )
        if not isinstance(state.get("enabled"), bool):
            raise SwitchError(f"{self._url}: the engine is starting.")
        return DraftingState(state["enabled"], length, in_use or 0)

    def set(self, body: dict[str, Any]) -> None:
        """Set the fields of ``body``; other fields stay. Raises SwitchError: it refuses."""
        self._ask(body)

    def _ask(self, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            answer = call(self._url, body, key=self._server.key)
        except EndpointError as error:
            raise SwitchError(f"The switch {SPECULATION}: {error}") from None
        document = answer.json()
        if not answer.ok or not isinstance(document, dict):
            told = document.get("error", {}) if isinstance(document, dict) else {}
            said = printable(told.get("message") or "") if isinstance(told, dict) else ""
            raise SwitchError(
                f"{self._url} answers HTTP {answer.status}{f': {said}' * bool(said)}."
            )
        return document
