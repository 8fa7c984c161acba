"""The gate before every call: keys, hosts, and limits of its body."""

import asyncio
import hmac
from collections.abc import Sequence
from contextlib import closing

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .admission import BodyRoom, Held
from .errors import EARLY_HEADERS, METHODS, Refusal, response
from .hosts import host_is_ours, origin_is_ours
from .settings import Settings
from .shown import short

OPEN = frozenset({"/health", "/ready", "/ping", "/metrics", "/", "/favicon.ico"})


def key_of(keys: Sequence[str], headers: Headers) -> int | None:
    """Return the number of the key in a call's headers, None for none, in constant time.

    OpenAI's clients send it as ``Authorization: Bearer KEY``, Anthropic's as ``x-api-key: KEY``.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    sent = token.strip().encode("latin-1")  # Starlette decodes headers as latin-1
    matches = [hmac.compare_digest(sent, key.encode()) for key in keys]
    return matches.index(True) if any(matches) else None


def is_open(path: str) -> bool:
    """Return whether a path needs no key."""
    return path in OPEN or path.startswith("/playground/")


class Gate:
    """Refuses calls without a key, from foreign pages, and bodies that are too large or too slow.

    It sets in the call's state: ``body``, the bytes, if there is one; ``key``, the number of its
    key, None without one; ``trusted``, False if the server has keys and the call has none of them.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.room = BodyRoom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        with closing(Held(self.room)) as held:
            try:
                self.admit(scope, headers)
                scope["state"]["held"] = held
                if self.has_body(scope, headers):
                    scope["state"]["body"] = await self.read(receive, held)
                    if scope["state"]["body"] is None:
                        return
            except Refusal as error:
                early = EARLY_HEADERS.get(error.status)
                id = scope["state"].get("request_id")
                answer = response(error, early, path=scope["path"], id=id)
                await answer(scope, receive, send)
            else:
                await self.app(scope, receive, send)

    def admit(self, scope: Scope, headers: Headers) -> None:
        """Check key, origin, method and port. Raises Refusal: 401, 403, 404 or 405."""
        settings, path, method = self.settings, scope["path"], scope["method"]
        state = scope.setdefault("state", {})
        key = state["key"] = key_of(settings.api_keys, headers)
        state["trusted"] = key is not None or not settings.api_keys
        if not state["trusted"] and not is_open(path):
            raise Refusal(
                "no valid API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                status=401,
                code="invalid_api_key",
            )  # fmt: skip
        if key is None:
            self.check_browser(headers, is_open(path) and method in ("GET", "HEAD"))
        if method not in METHODS:
            raise Refusal(f"no path allows {short(method)}; see /openapi.json.", status=405)
        port = settings.metrics_port
        if port is not None and (path == "/metrics") != (scope["server"][1] == port):
            raise Refusal(f"there is no {short(path)} on this port.", status=404)

    def check_browser(self, headers: Headers, public: bool) -> None:
        """Refuse calls that a foreign page can make a browser send. Raises Refusal: 403."""
        host, origin = headers.get("host"), headers.get("origin")
        # Only HTTP/1.0 comes without a Host, and no browser speaks it.
        if host is not None and not host_is_ours(host, self.settings):
            raise Refusal(
                f"the Host {short(host)!r} is not allowed here; start the server with "
                "--allowed-hosts NAME, or send an API key.", status=403, code="host_not_allowed",
            )  # fmt: skip
        if origin is None or public or origin_is_ours(origin, host or "", self.settings):
            return
        raise Refusal(
            f"the Origin {short(origin)!r} is not allowed here; start the server with "
            "--allowed-origins ORIGIN, or send an API key.", status=403,
            code="origin_not_allowed",
        )  # fmt: skip

    def has_body(self, scope: Scope, headers: Headers) -> bool:
        """Return whether a call has a body. Raises Refusal: 413, too large; 400, none allowed."""
        length = headers.get("content-length", "0")
        if int(length) > self.settings.max_body:
            raise Refusal(
                f"the body has {length} bytes; the limit is {self.settings.max_body}.",
                status=413,
            )
        has_body = int(length) > 0 or "transfer-encoding" in headers
        if has_body and (scope["method"] != "POST" or is_open(scope["path"])):
            raise Refusal(f"{scope['method']} {short(scope['path'])} takes no body.", status=400)
        return has_body

    async def read(self, receive: Receive, held: Held) -> bytes | None:
        """Return a call's body; None if the client is gone. Raises Refusal: 408 or 413."""
        parts, more = [], True
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                while more and held.size <= self.settings.max_body:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    parts.append(message.get("body", b""))
                    await held.add(len(parts[-1]))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise Refusal("the body took too long to arrive; send it again.", status=408) from None
        if held.size > self.settings.max_body:
            raise Refusal(f"the body has more than {self.settings.max_body} bytes.", status=413)
        return b"".join(parts)
