"""What stands before every call: keys, and limits of its body."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import TYPES, body
from .room import Held, Room
from .settings import Settings

OPEN = frozenset({"/health", "/ready", "/metrics", "/", "/favicon.ico"})
OPEN_BELOW = "/playground/"


def allowed(keys: Sequence[str], header: str | None) -> bool:
    """Whether an Authorization header has one of the keys; takes the same time for all."""
    scheme, _, given = (header or "").partition(" ")
    found = False
    for key in keys:
        # Headers are bytes, which reach this as latin-1.
        found |= hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return found and scheme.lower() == "bearer"


class Gate:
    """Refuses calls without a key, and bodies that are too large or too slow.

    Args:
        app: what stands behind.
        settings: keys and limits.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.room = Room()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        keys, path = self.settings.api_keys, scope["path"]
        open_ = path in OPEN or path.startswith(OPEN_BELOW)
        if keys and not open_ and not allowed(keys, headers.get(b"authorization")):
            text = "no valid API key: send it as 'Authorization: Bearer KEY'."
            await refuse(send, 401, text, "invalid_api_key")
            return
        most = self.settings.max_body
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > most:
            await refuse(send, 413, f"the body has {length} bytes; {most} are taken at most.")
            return
        if scope["method"] not in ("POST", "PUT", "PATCH", "DELETE"):
            await self.app(scope, receive, send)
            return
        held = Held(self.room)
        scope.setdefault("state", {})["held"] = held
        try:
            rest = await self._received(receive, send, held)
            if rest is not None:
                await self.app(scope, rest, send)
        finally:
            held.release()

    async def _received(self, receive: Receive, send: Send, held: Held) -> Receive | None:
        """A ``receive`` that gives the whole body, None where it was refused."""
        most = self.settings.max_body
        try:
            found = read(receive, most, held)
            whole = await asyncio.wait_for(found, self.settings.body_timeout)
        except TimeoutError:
            await refuse(send, 408, "the body took too long to come in; send it again.")
            return None
        if whole is None:
            await refuse(send, 413, f"the body has more than {most} bytes.")
            return None
        return once(whole, receive)


async def read(receive: Receive, most: int, held: Held) -> bytes | None:
    """A call's body, None where it is longer than ``most`` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        await held.add(len(parts[-1]))
        if size > most:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def once(whole: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives the whole body first."""
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
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
