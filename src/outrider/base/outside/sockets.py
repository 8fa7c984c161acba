"""Sockets on which name lookup, connection and transfer share one deadline."""

from __future__ import annotations

import io
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

CHUNK = 1 << 16


class Deadline:
    """The end of a call, ``seconds`` from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left.

        Raises:
            TimeoutError: none is left.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole answer within {self.seconds:g} s")
        return left


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """Return a connection to the first address of a host that accepts one.

    Raises:
        OSError: none does, or the name is unknown.
        TimeoutError: the deadline has passed.
    """
    places = _resolve(host, port, deadline)
    failure: OSError = OSError(f"{host} has no address")
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


def connect_unix(path: str, deadline: Deadline) -> socket.socket:
    """Return a connection to a unix socket.

    Raises:
        OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(deadline.left())
        connection.connect(path)
        return connection
    except BaseException:
        connection.close()
        raise


def send(connection: socket.socket, data: bytes, deadline: Deadline) -> None:
    """Send all bytes, or raise OSError."""
    rest = memoryview(data)
    while rest:
        connection.settimeout(deadline.left())
        rest = rest[connection.send(rest[:CHUNK]) :]


class Incoming(io.RawIOBase):
    """A stream of the bytes of a connection, read under the deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(self._deadline.left())
        return self._connection.recv_into(buffer)

    def makefile(self, *_: Any) -> io.BufferedReader:
        """Return a buffered reader, as ``socket.makefile`` does; http.client asks for it."""
        return io.BufferedReader(self)


def is_local(host: str, seconds: float = 2.0) -> bool:
    """Return whether a name resolves to loopback; False if that is not known in time."""
    try:
        places = _resolve(host, 0, Deadline(seconds))
        return any(ipaddress.ip_address(place[4][0]).is_loopback for place in places)
    except (OSError, ValueError):
        return False


def _resolve(host: str, port: int, deadline: Deadline) -> list[Any]:
    """Return the addresses of a name. The system's resolver can be neither timed nor stopped."""
    try:
        return _addresses(host, port, socket.AI_NUMERICHOST)
    except OSError:
        pass
    found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()
    look = threading.Thread(target=_tell, args=(found.put, host, port), daemon=True)
    look.start()
    try:
        addresses = found.get(timeout=deadline.left())
    except queue.Empty:
        raise TimeoutError(f"no address of its name within {deadline.seconds:g} s") from None
    if isinstance(addresses, OSError):
        raise addresses
    return addresses


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
