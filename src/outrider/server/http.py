"""HTTP/1.1 by uvicorn and httptools, with limits on what one connection can cost.

A connection answers one call at a time: pipelined requests after it are not answered.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import httptools
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)  # fmt: skip

from .access import HEADER, PROBES, request_id
from .errors import EARLY_HEADERS, Refusal, response
from .log import log_call
from .settings import Settings

LARGEST_HEAD = 1 << 16
MOST_FIELDS = 256
MOST_PIECES = 4096
"""Pieces of a body that may have any size; further ones average ``LEAST_PIECE`` bytes or more."""
LEAST_PIECE = 64
SPARE = 32
"""Connections beyond the limit that probes may still use."""
RESERVED_FILES = 128
LINGER_SECONDS = 2.0
LINGER_BYTES = 1 << 24
BUSY = "the server has reached its connection limit; try again later."


class Halt(Exception):
    """Ends the parsing of a request that is refused, with a status and a message."""


@dataclass
class Clock:
    """One timer of a connection, off or running."""

    loop: asyncio.AbstractEventLoop
    ring: Callable[[], None]
    timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """Call ``ring`` after ``seconds``, unless the clock runs already."""
        self.timer = self.timer or self.loop.call_later(seconds, self.ring)

    def stop(self) -> None:
        """Turn the clock off."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(eq=False)
class Quiet:
    """A transport that drops writes after its end; its protocol decides how it closes."""

    wire: asyncio.Transport
    protocol: Bounded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def write(self, data: bytes) -> None:
        """Send ``data`` unless the connection has ended."""
        if not self.is_closing():
            self.wire.write(data)

    def is_closing(self) -> bool:
        """Return True when nothing more can be sent."""
        return self.protocol.parting or self.wire.is_closing()

    def close(self) -> None:
        """End the connection when all that is written has been sent."""
        self.protocol.part()


class Unframed(RequestResponseCycle):
    """An answer in HTTP/1.0: a body of unknown length ends with the connection."""

    unframed = False

    async def send(self, message: Any) -> None:
        """Send an ASGI message."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.unframed = b"content-length" not in names
            if self.unframed:
                self.chunked_encoding = False
        elif self.unframed:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class Bounded(HttpToolsProtocol):
    """One connection, with limits on time, sizes and pieces.

    Attributes:
        owing: connections that have not sent a whole request, longest waiting first.
        late, unread: clocks that run until the headers are in, and while the client does not read.
        in_head: the next byte belongs to a request line or a header.
        whole: every byte of the last request has come in.
        deaf: bytes that may still come in and are dropped; None while input is parsed.
        parting: the last byte is written, and the client may still send.
        raw: bytes that came in since the request began.
    """

    settings: ClassVar[Settings]
    owing: ClassVar[dict[Bounded, None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_head = self.whole = True
        self.parting = False
        self.deaf: int | None = None
        self.raw = self.fields = self.pieces = self.size = 0

    @property
    def idle(self) -> bool:
        """True while no call is being answered."""
        return self.cycle is None or self.cycle.response_complete

    # What asyncio calls

    def connection_made(self, transport: Any) -> None:
        """Make room where there are too many connections."""
        self.wire: asyncio.Transport = transport
        self.late, self.unread = (Clock(self.loop, transport.abort) for _ in range(2))
        super().connection_made(Quiet(transport, self))  # type: ignore[arg-type]
        if len(self.connections) > self.settings.max_connections + SPARE:
            oldest = next(iter(self.owing), self)
            self.connections.discard(oldest)
            self.owing.pop(oldest, None)
            oldest.wire.abort()
        if not self.wire.is_closing():
            self.owing[self] = None
            self.late.start(self.settings.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks, and notify the call."""
        self.owing.pop(self, None)
        self.late.stop()
        self.unread.stop()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Treat the end of the client's side as the end of the connection."""
        if not self.idle:
            self.drop_call()
            self.wire.abort()
        elif self.wire.get_write_buffer_size():
            self.unread.start(self.settings.write_timeout)

    def data_received(self, data: bytes) -> None:
        """Parse bytes that came in."""
        if self.deaf is not None:
            self.deaf -= len(data)
            if self.deaf < 0:
                self.wire.abort()
            return
        self._unset_keepalive_if_required()
        self.raw += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self.without_upgrade(data[error.args[0] :])
        except httptools.HttpParserError as error:
            if self.deaf is None:
                wrong = error.__context__  # of an error in a callback
                known = wrong.args if isinstance(wrong, Halt) else ()
                self.refuse(*(known or (400, f"this is not HTTP/1.1: {error}.")))
        else:
            self.check_size()
            if self.in_head and self.idle and not self.transport.is_closing():
                self.late.start(self.settings.header_timeout)

    def pause_writing(self) -> None:
        """Give a client that does not read a limited time."""
        super().pause_writing()
        self.unread.start(self.settings.write_timeout)

    def resume_writing(self) -> None:
        """Stop the clock: the client reads."""
        super().resume_writing()
        if not self.transport.is_closing():
            self.unread.stop()

    # What the parser calls

    def on_message_begin(self) -> None:
        """Begin a request, if the one before has been answered."""
        if not self.idle:
            self.cycle.keep_alive = self.whole = False
            self.deaf = LINGER_BYTES
            raise Halt
        self.in_head, self.whole = True, False
        self.fields = self.pieces = self.size = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; a trailer is dropped."""
        self.fields += 1
        if self.fields > MOST_FIELDS:
            raise Halt(431, f"the request has more than {MOST_FIELDS} headers.")
        if self.in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a call."""
        if self.parser.should_upgrade():
            return
        version = self.parser.get_http_version()
        self.check_head(version)
        crowded = len(self.connections) - len(self.owing) >= self.settings.max_connections
        self.app = probes_only(self.config.loaded_app) if crowded else self.config.loaded_app
        super().on_headers_complete()
        if version == "1.0":
            cycle: Any = self.cycle
            cycle.__class__ = Unframed  # uvicorn has no other place for it
        self.in_head = False
        self.late.stop()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body; refuse a body of too many small pieces."""
        self.pieces += 1
        self.size += len(body)
        if self.pieces > MOST_PIECES + self.size // LEAST_PIECE:
            raise Halt(
                400, f"the body comes in {self.pieces} pieces of a few bytes; send it in one piece."
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Mark the call's body as whole."""
        if self.parser.should_upgrade():
            return
        self.in_head = self.whole = True
        self.raw = 0
        self.owing.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request; end the connection if this one was not read to its end."""
        super().on_response_complete()
        if not self.whole:
            self.part()
        if not self.transport.is_closing():
            self.owing[self] = None

    # Limits

    def check_head(self, version: str) -> None:
        """Refuse a head that proxies and servers might read in different ways."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        encodings = [value for name, value in self.headers if name == b"transfer-encoding"]
        hosts = sum(name == b"host" for name, _ in self.headers)
        if size > LARGEST_HEAD:
            raise Halt(431, f"the headers have more than {LARGEST_HEAD} bytes.")
        if version not in ("1.0", "1.1"):
            raise Halt(400, f"HTTP/{version} is not supported; use HTTP/1.1.")
        if encodings and (version == "1.0" or [v.lower() for v in encodings] != [b"chunked"]):
            raise Halt(400, "the only supported Transfer-Encoding is chunked, in HTTP/1.1.")
        if hosts > 1 or (version == "1.1" and not hosts):
            raise Halt(400, f"the request has {hosts} Host headers; send one.")

    def check_size(self) -> None:
        """Refuse a head that is too large, and a body that is mostly something else."""
        if self.in_head and self.raw > LARGEST_HEAD:
            self.refuse(431, f"the headers have more than {LARGEST_HEAD} bytes.")
        elif self.raw > 2 * self.settings.max_body + LARGEST_HEAD:
            self.refuse(413, f"the body has more than {self.settings.max_body} bytes.")

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error in place of the call, and end the connection."""
        id = request_id(Headers(raw=self.headers or []))
        if self.idle:
            log_call({"request_id": id, "status": status, "error": message})
        elif self.cycle.response_started:
            self.wire.abort()
            return
        else:  # the call's own layers count and log it
            state = self.cycle.scope["state"]
            id = state.setdefault("request_id", id)
            state["refused"] = status, message
            self.drop_call()
        answer = response(Refusal(message, status=status), {"Connection": "close", HEADER: id})
        fields = [*self.server_state.default_headers, *answer.raw_headers]
        self.transport.write(STATUS_LINE[status] + head_of(fields) + bytes(answer.body))
        self.whole = False
        self.part()

    def drop_call(self) -> None:
        """Tell the call that its client is gone."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def without_upgrade(self, rest: bytes) -> None:
        """Parse a request again without its request for another protocol, as HTTP allows."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.refuse(400, "this server is not a proxy.")
            return
        fields = [(n, v) for n, v in self.headers if n not in (b"upgrade", b"http2-settings")]
        version = self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        start = b"%s %s HTTP/%s\r\n" % (method, self.url, version)
        self.data_received(start + head_of(fields) + rest)

    # The end

    def part(self) -> None:
        """End the connection; drop input for a short time, or a reset could lose the answer."""
        if self.transport.is_closing():
            return
        self.owing[self] = None
        if self.whole:
            self.wire.close()
            if self.wire.get_write_buffer_size():
                self.unread.start(self.settings.write_timeout)
            return
        self.late.stop()
        self.unread.stop()
        self.flow.resume_reading()
        self.parting, self.deaf = True, LINGER_BYTES
        self.wire.write_eof()
        self.unread.start(LINGER_SECONDS)


def head_of(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return header lines and the empty line after them."""
    return b"".join(name + b": " + value + b"\r\n" for name, value in fields) + b"\r\n"


def probes_only(app: Any) -> Any:
    """Return an app that answers probes, and 503 to all else."""

    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await app(scope, receive, send)
        else:
            headers = {**EARLY_HEADERS[503], HEADER: request_id(Headers(scope=scope))}
            await response(Refusal(BUSY, status=503), headers)(scope, receive, send)

    return busy


def bounded(settings: Settings) -> type[Bounded]:
    """Return the protocol of a server with these limits."""
    return type("Bounded", (Bounded,), {"settings": settings, "owing": {}})


def files(most_connections: int) -> int:
    """Raise the limit on open files as needed; return how many connections the process may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most_connections + SPARE + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return most_connections
    most = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, most - SPARE - RESERVED_FILES)
