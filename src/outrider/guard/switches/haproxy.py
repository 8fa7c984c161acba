"""HAProxy's runtime API: weights of two servers of one backend."""

from __future__ import annotations

import re
import socket

from ..policy import Traffic
from ..states import Weights
from . import SwitchError

SECONDS = 3.0
MOST_BYTES = 1 << 20
WEIGHT = re.compile(r"^(\d+) \(initial \d+\)$")


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
        try:
            with self._connect() as connection:
                connection.sendall(f"{command}\n".encode())
                said = b""
                while len(said) < MOST_BYTES and (more := connection.recv(4096)):
                    said += more
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            raise SwitchError(f"HAProxy at {self._address} does not answer ({why}).") from None
        return " ".join(said.decode("utf-8", "replace").split())

    def _connect(self) -> socket.socket:
        kind, _, place = self._address.partition(":")
        if kind == "tcp":
            host, _, port = place.rpartition(":")
            return socket.create_connection((host.strip("[]"), int(port)), SECONDS)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(SECONDS)
            connection.connect(place)
        except OSError:
            connection.close()
            raise
        return connection
