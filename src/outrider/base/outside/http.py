"""One HTTP call with one deadline, no redirects, no proxies and a bounded answer.

httpx limits each wait but not their sum, so it runs on our own connections, which share a deadline.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpcore
import httpx

from ...errors import ConfigError, EndpointError, OutriderError, shown
from .documents import MIB, parse_json
from .sockets import Deadline, connect, receive, send
from .text import printable

MOST_BYTES = MIB
"""Most bytes of an answer, unless a caller sets another limit."""
MOST_HEADERS = 100
MOST_HEADER_BYTES = 1 << 16
SECONDS = 5.0
AGENT = "outrider"


class Address(NamedTuple):
    """The address of a server, without user and password.

    ``place`` is the URL without a path; ``path`` has no slash at its end.
    """

    scheme: str
    host: str
    port: int
    place: str
    path: str = ""


@dataclass(frozen=True)
class Answer:
    """The status and body of an answer."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Return whether the status is a success."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Return the body's value; None if it is not JSON within the bounds of ``documents``."""
        try:
            return parse_json(self.body, "The answer", limit=len(self.body))
        except OutriderError:
            return None


def address(url: str, what: str = "endpoint") -> Address:
    """Return the parts of a URL, http without a scheme; errors call it ``what``."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
        _ = parts.netloc.encode("idna")
    except ValueError:  # also a label of more than 63 letters
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or not host.isprintable():
        raise ConfigError(f"{what} {shown(url)} is not an address; give one like http://host:8000.")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return Address(parts.scheme, host, port, place, parts.path.rstrip("/"))


def check_key(key: str | None) -> None:
    """Refuse a key that no header can carry."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key has characters that no header can carry; correct it.")


def call(
    url: str, body: Any = None, *, method: str | None = None, key: str | None = None,
    headers: Mapping[str, str] | None = None, seconds: float = SECONDS, limit: int = MOST_BYTES,
    tls: ssl.SSLContext | None = None, take: Callable[[bytes], None] | None = None,
) -> Answer:  # fmt: skip
    """Return the answer to a request: POST with a JSON body, GET without a body.

    The ``key`` is sent as a bearer token, to this host only. ``seconds`` is the limit for the whole
    call: name, connection, TLS, head, body; ``limit`` that of the body's bytes. ``tls`` replaces
    the system's certificate authorities. ``take`` is called with the parts of a successful body as
    they arrive; the answer's body then stays empty.

    Raises ConfigError: the address or the key is malformed; EndpointError: no answer comes in time,
    or it is not HTTP, too long, or a redirect.
    """
    there = address(url, "the address")
    check_key(key)
    sent = {"User-Agent": AGENT, "Accept-Encoding": "identity", "Connection": "close"}
    if body is not None:
        sent["Content-Type"] = "application/json"
    if key:
        sent["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    method = method or ("GET" if data is None else "POST")
    parts = urlsplit(url if "://" in url else f"http://{url}")
    target = f"{there.place}{parts.path}{f'?{parts.query}' * bool(parts.query)}"
    deadline = Deadline(seconds)
    try:
        with (
            httpx.Client(transport=_Transport(deadline, tls), trust_env=False) as client,
            client.stream(method, target, content=data, headers=sent | dict(headers or {})) as came,
        ):
            return _taken(came, there, deadline, limit, take)
    except TimeoutError as error:
        raise EndpointError(
            f"{there.place} does not answer ({printable(error)}); is the server healthy?"
        ) from None
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        why = printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        raise EndpointError(
            f"{there.place} cannot be reached ({why}); start the server or correct the address."
        ) from None


def _taken(
    came: httpx.Response, there: Address, deadline: Deadline, limit: int,
    take: Callable[[bytes], None] | None,
) -> Answer:  # fmt: skip
    """Return the answer once its whole body is here; refuse redirects and too long bodies."""
    head = [len(name) + len(value) for name, value in came.headers.raw]
    if len(head) > MOST_HEADERS or sum(head) > MOST_HEADER_BYTES:
        raise EndpointError(f"{there.place} answers with too many headers; check the address.")
    if 300 <= came.status_code < 400:
        place = printable(came.headers.get("Location") or "nowhere", 200)
        raise EndpointError(
            f"{there.place} redirects to {place} (HTTP {came.status_code}); give that "
            "address if you trust it."
        )
    body, size = bytearray(), 0
    if take is None or not came.is_success:
        take = body.extend
    for part in came.iter_raw():  # undecoded: a small compressed body may unpack to gigabytes
        take(part)
        size += len(part)
        if size > limit:
            raise EndpointError(
                f"{there.place} answers with more than {limit / MIB:g} MiB; check the address."
            )
        deadline.left()  # ``take`` may be slow
    return Answer(came.status_code, bytes(body))


class _Transport(httpx.HTTPTransport):
    """httpx on connections that share a deadline."""

    def __init__(self, deadline: Deadline, tls: ssl.SSLContext | None) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls or _authorities(), network_backend=_Network(deadline)
        )


class _Network(httpcore.NetworkBackend):
    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore.NetworkStream:
        return _Stream(connect(host, port, self._deadline), self._deadline)


class _Stream(httpcore.NetworkStream):
    """A connection that is read and written under the deadline; httpcore's own limits are unset."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._connection, self._deadline = connection, deadline
        self._unsent = b""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        send(self._connection, self._unsent, self._deadline)  # head and body in one piece
        self._unsent = b""
        return receive(self._connection, max_bytes, self._deadline)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._unsent += buffer

    def close(self) -> None:
        self._connection.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:  # fmt: skip
        self._connection = ssl_context.wrap_socket(
            self._connection, server_hostname=server_hostname, do_handshake_on_connect=False
        )
        try:
            self._connection.settimeout(self._deadline.left())
            self._connection.do_handshake()
        except BaseException:
            self._connection.close()
            raise
        return self


@cache
def _authorities() -> ssl.SSLContext:
    return ssl.create_default_context()
