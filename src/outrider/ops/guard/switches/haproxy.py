"""HAProxy's runtime API: weights of two servers of one backend."""

from __future__ import annotations

import re

from ....base.outside.sockets import CHUNK, Deadline, connect, connect_unix, receive, send
from ....base.outside.text import printable
from ..policy import Traffic
from ..states import Weights
from .base import SwitchError

SECONDS = 3.0
MOST_BYTES = 1 << 16
WEIGHT = re.compile(r"^([0-9]{1,6}) \(initial [0-9]{1,6}\)$")


class HAProxy:
    """Speaks to the stats socket, which needs ``level admin``; one command a connection."""

    def __init__(self, traffic: Traffic) -> None:
        self._address = traffic.address or ""
        self._servers = [
            f"{traffic.backend}/{traffic.engine}",
            f"{traffic.backend}/{traffic.standby}",
        ]

    def read(self) -> Weights:
        """Return the weights in force."""
        engine, standby = (self._weight(server) for server in self._servers)
        return engine, standby

    def set(self, weights: Weights) -> None:
        """Put weights into force; who gains comes first, so that somebody always serves."""
        pairs = sorted(zip(weights, self._servers, strict=True), reverse=True)
        for weight, server in pairs:
            said = self._ask(f"set weight {server} {weight}")
            if said:
                raise SwitchError(
                    f"HAProxy at {self._address} refuses a weight of {server}: {said}"
                )

    def _weight(self, server: str) -> int:
        said = self._ask(f"get weight {server}")
        match = WEIGHT.match(said)
        if match is None:
            raise SwitchError(f"HAProxy at {self._address} has no weight of {server}: {said}")
        return int(match[1])

    def _ask(self, command: str) -> str:
        """Return what HAProxy says to a command, on one line."""
        kind, _, place = self._address.partition(":")
        host, _, port = place.rpartition(":")
        deadline = Deadline(SECONDS)
        try:
            with (
                connect(host.strip("[]"), int(port), deadline) if kind == "tcp"
                else connect_unix(place, deadline)
            ) as connection:  # fmt: skip
                send(connection, f"{command}\n".encode(), deadline)
                said = b""
                while len(said) < MOST_BYTES and (more := receive(connection, CHUNK, deadline)):
                    said += more
        except OSError as error:
            why = printable(error.strerror or error)
            raise SwitchError(f"HAProxy at {self._address} does not answer ({why}).") from None
        return printable(said.decode("utf-8", "replace"))
