"""One HTTP call with one deadline, no redirects, no proxies and a bounded answer.

It uses the standard library's parser of answers on our own sockets. Clients such as httpx limit
each wait but not their sum, and wait for a name as long as the system's resolver does.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote, urlsplit

from ...errors import ConfigError, EndpointError, OutriderError, shown
from .documents import MIB, parse_json
from .sockets import CHUNK, Deadline, Incoming, connect, send
from .text import printable

MOST_BYTES = MIB
"""Most bytes of an answer, unless a caller sets another limit."""
SECONDS = 5.0
AGENT = "outrider"


@dataclass(frozen=True)
class Address:
    """The address of a server, without user and password. ``path`` has no slash at its end."""

    scheme: str
    host: str
    port: int
    place: str
    path: str = ""

    @property
    def authority(self) -> str:
        """Return host and port as a header names them."""
        netloc = self.place.partition("://")[2]
        return netloc if netloc.isascii() else netloc.encode("idna").decode("ascii")

    @property
    def secure(self) -> bool:
        """Return whether it is reached over TLS."""
        return self.scheme == "https"

    @property
    def url(self) -> str:
        """Return it as a URL without a query."""
        return f"{self.place}{self.path}"


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

    def text(self) -> str:
        """Return the body as text; invalid UTF-8 becomes U+FFFD."""
        return self.body.decode("utf-8", "replace")


def address(url: str, what: str = "endpoint") -> Address:
    """Return the parts of a URL; without a scheme it is http.

    Raises:
        ConfigError: it is not an address; ``what`` names it in the message.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
        _ = parts.netloc.encode("idna")
    except ValueError:  # also a label of more than 63 letters
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or not host.isprintable():
        raise ConfigError(f"{what} {shown(url)} is not an address; give one like http://host:8000.")
    usual = 443 if parts.scheme == "https" else 80
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return Address(
        parts.scheme, host, usual if port is None else port, place, parts.path.rstrip("/")
    )


def check_key(key: str | None, what: str = "the API key") -> None:
    """Refuse a key that no header can carry.

    Raises:
        ConfigError: no header can carry it.
    """
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{what} has characters that no header can carry; correct it.")


def call(
    url: str, body: Any = None, *, method: str | None = None, key: str | None = None,
    headers: Mapping[str, str] | None = None, seconds: float = SECONDS, limit: int = MOST_BYTES,
    tls: ssl.SSLContext | None = None, take: Callable[[bytes], None] | None = None,
) -> Answer:  # fmt: skip
    """Return the answer to a request: POST with a JSON body, GET without a body.

    Args:
        url: http or https; it may have a query.
        key: sent as a bearer token, to this host only.
        seconds: limit for the whole call: name, connection, TLS, head, body.
        limit: most bytes of the answer's body.
        tls: replaces the system's certificate authorities.
        take: gets the parts of a successful body as they come; the body of the answer stays empty.

    Raises:
        ConfigError: the address or the key is malformed.
        EndpointError: no answer comes in time, or it is not HTTP, too long, or a redirect.
    """
    there = address(url, "the address")
    check_key(key)
    data = None if body is None else json.dumps(body).encode()
    sent = {
        "Host": there.authority, "User-Agent": AGENT, "Accept": "*/*",
        "Accept-Encoding": "identity", "Connection": "close", **(headers or {}),
    }  # fmt: skip
    if data is not None:
        sent = {"Content-Type": "application/json", **sent, "Content-Length": str(len(data))}
    if key:
        sent["Authorization"] = f"Bearer {key}"
    method = method or ("GET" if data is None else "POST")
    lines = [f"{method} {_target(url)} HTTP/1.1", *(f"{name}: {sent[name]}" for name in sent)]
    request = "\r\n".join([*lines, "", ""]).encode() + (data or b"")
    try:
        return _exchange(there, request, method, Deadline(seconds), limit, tls, take)
    except TimeoutError as error:
        why = printable(error)
        raise EndpointError(
            f"{there.place} does not answer ({why}); is the server healthy?"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        raise EndpointError(
            f"{there.place} cannot be reached ({why}); start the server or correct the address."
        ) from None


def _exchange(
    there: Address, request: bytes, method: str, deadline: Deadline, limit: int,
    tls: ssl.SSLContext | None, take: Callable[[bytes], None] | None,
) -> Answer:  # fmt: skip
    """Send a request and return the whole answer.

    Raises:
        OSError: the connection breaks, or the deadline passes.
        http.client.HTTPException: what comes is not HTTP.
        EndpointError: it is a redirect, or too long.
    """
    connection = connect(there.host, there.port, deadline)
    try:
        if there.secure:
            connection = (tls or _authorities()).wrap_socket(
                connection, server_hostname=there.host, do_handshake_on_connect=False
            )
            connection.settimeout(deadline.left())
            connection.do_handshake()
        send(connection, request, deadline)
        answer = http.client.HTTPResponse(Incoming(connection, deadline), method=method)  # type: ignore[arg-type]
        answer.begin()
        if 300 <= answer.status < 400:
            place = printable(answer.getheader("Location") or "nowhere", 200)
            raise EndpointError(
                f"{there.place} redirects to {place} (HTTP {answer.status}); give that "
                "address if you trust it."
            )
        body, size = bytearray(), 0
        if take is None or not 200 <= answer.status < 300:
            take = body.extend
        while more := answer.read1(CHUNK):
            take(more)
            size += len(more)
            if size > limit:
                raise EndpointError(
                    f"{there.place} answers with more than {limit / MIB:g} MiB; check the address."
                )
            deadline.left()  # ``take`` may be slow
        if answer.length:
            raise http.client.IncompleteRead(b"", answer.length)
        return Answer(answer.status, bytes(body))
    finally:
        connection.close()


def _target(url: str) -> str:
    """Return path and query as they are sent, with characters encoded that no URL may have."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~", errors="replace")
    query = quote(parts.query, safe="/%:@!$&'()*+,;=~?[]", errors="replace")
    return f"{path}?{query}" if query else path


@cache
def _authorities() -> ssl.SSLContext:
    return ssl.create_default_context()
