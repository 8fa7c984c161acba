"""The gate before every call: keys, hosts, and limits of its body."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import RETRY_SECONDS, TYPES, ServerError, body
from .hosts import host_is_ours, origin_is_ours
from .room import Held, Room
from .settings import Settings
from .shown import short

OPEN = frozenset({"/health", "/ready", "/metrics", "/", "/favicon.ico"})
OPEN_BELOW = "/playground/"
METHODS = ("GET", "HEAD", "POST")


def key_of(keys: Sequence[str], header: str | None) -> int | None:
    """Return the number of the key in an Authorization header, None for none, in constant time."""
    scheme, _, given = (header or "").partition(" ")
    found = None
    for number, key in enumerate(keys):
        # Headers are bytes, which reach this as latin-1.
        if hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
            found = number
    return found if scheme.lower() == "bearer" else None


def is_open(path: str) -> bool:
    """Return whether a path needs no key."""
    return path in OPEN or path.startswith(OPEN_BELOW)


class Gate:
    """Refuses calls without a key, from foreign pages, and bodies that are too large or too slow.

    It leaves in the call's state: ``key``, the number of its key, None without one; ``trusted``,
    False for a call that has no key where there are keys.

    Args:
        app: what stands behind.
        settings: keys, hosts and limits.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.room = Room()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = Held(self.room)
        try:
            received = await self.received(scope, receive, send, held)
            if received is not None:
                await self.app(scope, received, send)
        finally:
            held.release()

    async def received(
        self, scope: Scope, receive: Receive, send: Send, held: Held
    ) -> Receive | None:
        """Return a ``receive`` that gives the whole body; None for a call that was refused."""
        headers = Headers(scope=scope)
        try:
            self.admit(scope, headers)
            scope["state"]["held"] = held
            if not self.has_body(scope, headers):
                return receive
            whole = await self.read(receive, held)
        except ServerError as error:
            await refuse(send, error.status, str(error), error.code)
            return None
        return None if whole is None else once(whole, receive)

    def admit(self, scope: Scope, headers: Headers) -> None:
        """Check who calls what, and from where.

        Raises:
            ServerError: 401, 403, 404 or 405.
        """
        settings, path, method = self.settings, scope["path"], scope["method"]
        state = scope.setdefault("state", {})
        key = state["key"] = key_of(settings.api_keys, headers.get("authorization"))
        state["trusted"] = key is not None or not settings.api_keys
        if not state["trusted"] and not is_open(path):
            text = "no valid API key: send it as 'Authorization: Bearer KEY'."
            raise ServerError(401, text, code="invalid_api_key")
        if key is None:
            self.check_browser(headers, is_open(path) and method in ("GET", "HEAD"))
        if method not in METHODS:
            raise ServerError(405, f"{short(method)} is not for any path here; see /openapi.json.")
        port = settings.metrics_port
        if port is not None and (path == "/metrics") != (scope["server"][1] == port):
            raise ServerError(404, f"there is no {short(path)} at this port.")

    def check_browser(self, headers: Headers, public: bool) -> None:
        """Refuse what a foreign page can make a browser send.

        Raises:
            ServerError: 403.
        """
        host, origin = headers.get("host"), headers.get("origin")
        # Only HTTP/1.0 comes without a Host, and no browser speaks it.
        if host is not None and not host_is_ours(host, self.settings):
            raise ServerError(
                403, f"the Host {short(host)!r} is not allowed here; start the server with "
                "--allowed-hosts NAME, or send an API key.", code="host_not_allowed",
            )  # fmt: skip
        if origin is None or public or origin_is_ours(origin, host or "", self.settings):
            return
        raise ServerError(
            403, f"the Origin {short(origin)!r} is not allowed here; start the server with "
            "--allowed-hosts NAME, or send an API key.", code="origin_not_allowed",
        )  # fmt: skip

    def has_body(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a call has a body, which its path takes.

        Raises:
            ServerError: 400 or 413.
        """
        length = headers.get("content-length", "0")
        if int(length) > self.settings.max_body:
            text = f"the body has {length} bytes; {self.settings.max_body} are taken at most."
            raise ServerError(413, text)
        given = int(length) > 0 or "transfer-encoding" in headers
        if given and (scope["method"] != "POST" or is_open(scope["path"])):
            raise ServerError(400, f"{scope['method']} {short(scope['path'])} takes no body.")
        return given

    async def read(self, receive: Receive, held: Held) -> bytes | None:
        """Return a call's body, None where the client has gone.

        Raises:
            ServerError: 408 or 413.
        """
        most = self.settings.max_body
        try:
            found = read(receive, most, held)
            whole = await asyncio.wait_for(found, self.settings.body_timeout)
        except TimeoutError:
            text = "the body took too long to come in; send it again."
            raise ServerError(408, text) from None
        if whole is not None and len(whole) > most:
            raise ServerError(413, f"the body has more than {most} bytes.")
        return whole


async def read(receive: Receive, most: int, held: Held) -> bytes | None:
    """Return a call's body, cut soon after ``most`` bytes; None where the client has gone."""
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= most:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        await held.add(len(parts[-1]))
        more = message.get("more_body", False)
    return b"".join(parts)


def once(whole: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the whole body first."""
    left = [whole]

    async def found() -> Message:
        if not left:
            return await receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return found


async def refuse(send: Send, status: int, message: str, code: str | None = None) -> None:
    """Answer with an error."""
    assert status in TYPES
    text = json.dumps(body(status, message, None, code)).encode()
    headers = [
        (b"content-type", b"application/json"), (b"content-length", str(len(text)).encode()),
    ]  # fmt: skip
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 405:
        headers.append((b"allow", ", ".join(METHODS).encode()))
    if status == 503:
        headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
    if status in (400, 408, 413, 503):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
