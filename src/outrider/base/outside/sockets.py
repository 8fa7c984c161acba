"""Sockets on which name lookup, connection and transfer share one deadline."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

CHUNK = 1 << 16
LOOKUP_SECONDS = 2.0


class Deadline:
    """The end of a call, ``seconds`` from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left, or raise TimeoutError."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole answer within {self.seconds:g} s")
        return left


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Return a connection to the first address of a host that accepts one, or raise OSError."""
    return _first(_resolve(host, port, deadline), deadline)


def connect_unix(path: str, deadline: Deadline) -> socket.socket:
    """Return a connection to a unix socket, or raise OSError."""
    return _first([(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", path)], deadline)


def _first(places: Sequence[Any], deadline: Deadline) -> socket.socket:
    failure = OSError("it has no address")
    for number, (family, kind, protocol, _, place) in enumerate(places):
        connection = socket.socket(family, kind, protocol)
        try:
            # An address that does not respond must leave time for the next one.
            connection.settimeout(deadline.left() / (len(places) - number))
            connection.connect(place)
            return connection
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            failure = error
    deadline.left()
    raise failure


def send(connection: socket.socket, data: bytes, deadline: Deadline) -> None:
    """Send all bytes, or raise OSError."""
    rest = memoryview(data)
    while rest:
        connection.settimeout(deadline.left())
        rest = rest[connection.send(rest[:CHUNK]) :]


def receive(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Return what came, at most ``size`` bytes, b"" at the end; or raise OSError."""
    connection.settimeout(deadline.left())
    return connection.recv(size)


def is_local(host: str) -> bool:
    """Return whether a name resolves to loopback; False if that is not known in time."""
    try:
        places = _resolve(host, 0, Deadline(LOOKUP_SECONDS))
        return any(ipaddress.ip_address(place[4][0]).is_loopback for place in places)
    except (OSError, ValueError):
        return False


def _resolve(host: str, port: int, deadline: Deadline) -> list[Any]:
    """Return the addresses of a name. The system's resolver can be neither timed nor stopped."""
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except OSError:
        pass
    answers: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()
    threading.Thread(target=_tell, args=(answers.put, host, port), daemon=True).start()
    try:
        answer = answers.get(timeout=deadline.left())
    except queue.Empty:
        raise TimeoutError(f"no address of its name within {deadline.seconds:g} s") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _addresses(host: str, port: int, flags: int = 0) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, flags)
    except (ValueError, OverflowError):  # a label of more than 63 letters, a NUL
        raise OSError("a host cannot have such a name") from None


def _tell(put: Callable[[list[Any] | OSError], None], host: str, port: int) -> None:
    try:
        put(_addresses(host, port))
    except OSError as error:
        put(error)
