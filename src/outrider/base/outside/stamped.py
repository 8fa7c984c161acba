"""An HTTP/1.1 client that stamps every part of an answer with the time at which it arrived.

It does no more than a load test needs, on asyncio's transports and httptools. Parsing of the parts
waits until the answer is complete, so that one stream's parsing does not delay another's stamps.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httptools

from ...errors import SHOWN, EndpointError, shown
from .documents import MIB
from .http import address, check_key
from .text import printable

BROKEN = "the connection ended before the answer did"
MOST_BYTES = 16 * MIB
"""Most bytes of an answer, with its head and informational answers before it."""
GONE = "the connection ended before an answer began"
Piece = tuple[float, bytes]
"""A part of a body, and when it arrived: seconds on ``time.perf_counter``."""


class GoneError(EndpointError):
    """The connection ended before any byte of an answer."""


@dataclass
class StampedAnswer:
    """An answer. ``pieces`` are the body's parts in order."""

    status: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class Connection(asyncio.Protocol):
    """A connection with one exchange at a time and answers of at most ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.transport: asyncio.Transport | None = None
        self.usable = True
        self._parser = httptools.HttpResponseParser(self)
        self._answer = StampedAnswer()
        self._done: asyncio.Future[StampedAnswer] | None = None
        self._now = 0.0
        self._heard = False
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._heard = True
        self._size += len(data)
        if self._size > self._most:
            self._fail(EndpointError(f"the answer has more than {self._most / MIB:.3g} MiB"))
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(EndpointError(f"the answer is not HTTP ({error})"))
            self.close()

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        if self._answer.status < 200:  # 100 Continue: the answer follows
            return
        self.usable = self.usable and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)

    def eof_received(self) -> None:
        self.usable = False

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self._fail(EndpointError(BROKEN) if self._heard else GoneError(GONE))

    def _fail(self, why: EndpointError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(why)

    async def exchange(self, request: bytes) -> StampedAnswer:
        """Send a request and return its whole answer, or raise GoneError or EndpointError."""
        assert self.transport is not None
        self._answer, self._done = StampedAnswer(), asyncio.get_running_loop().create_future()
        self._heard, self._size = False, 0
        self.transport.write(request)
        try:
            return await self._done
        except BaseException:
            self.close()  # what is still to come must not be taken for the next answer
            raise

    def close(self) -> None:
        """End the connection."""
        self.usable = False
        if self.transport is not None:
            self.transport.abort()


class Client:
    """Sends requests to one server, over one kept connection per concurrent request.

    ``url`` may end in ``/v1``. ``key`` is sent as a bearer token. ``more`` bytes are allowed beyond
    ``MOST_BYTES``.
    """

    def __init__(self, url: str, key: str | None = None, more: int = 0) -> None:
        self._most = MOST_BYTES + more
        there = address(url)
        check_key(key)
        self.host, self.port = there.host, there.port
        self.tls = ssl.create_default_context() if there.scheme == "https" else None
        self.base = there.path.removesuffix("/v1")
        self.url = there.place + self.base
        authority = there.place.partition("://")[2].encode("idna").decode("ascii")
        self._head = f"Host: {authority}\r\nUser-Agent: outrider-bench\r\nAccept: */*\r\n" + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )
        self._idle: deque[Connection] = deque()

    def encode(self, path: str, body: Any = None) -> bytes:
        """Return the bytes of a request: POST of JSON, GET where there is no body."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {self.base}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return f"{head}\r\n".encode() + data

    async def send(self, request: bytes) -> StampedAnswer:
        """Return the answer to encoded bytes; raise EndpointError if there is none.

        Servers end idle connections: if a kept one ends before any byte of an answer, the request
        is sent once more, over a new connection.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                with suppress(GoneError):
                    return self._keep(connection, await connection.exchange(request))
                break
        connection = await self._connect()
        return self._keep(connection, await connection.exchange(request))

    def _keep(self, connection: Connection, answer: StampedAnswer) -> StampedAnswer:
        """Return the answer; the connection is kept for the next request if it can be."""
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def ask(self, path: str, body: Any = None, seconds: float = 30.0) -> StampedAnswer:
        """Return the answer to one request outside of the load, within ``seconds``."""
        try:
            return await asyncio.wait_for(self.send(self.encode(path, body)), seconds)
        except TimeoutError:
            raise EndpointError(
                f"{self.url}{path} does not answer within {seconds:g} s; is the server healthy?"
            ) from None
        except EndpointError as error:
            if self.url in str(error):
                raise
            raise EndpointError(
                f"{self.url}{path} gave no answer ({error}); is an HTTP server there?"
            ) from None

    async def model(self) -> str:
        """Return the name of the first model. Raises EndpointError: the server lists none."""
        answer = await self.ask("/v1/models")
        if answer.status in (401, 403):
            raise EndpointError(
                f"{self.url} wants an API key (HTTP {answer.status}); give --api-key."
            )
        said = shown(answer.body[:SHOWN].decode(errors="replace"))
        why = "it lists no model" if answer.ok else f"HTTP {answer.status}: {said}"
        with suppress(ValueError, LookupError, TypeError, RecursionError, MemoryError):
            name = json.loads(answer.body)["data"][0]["id"]
            if answer.ok and isinstance(name, str):
                return name
        raise EndpointError(
            f"{self.url}/v1/models is not OpenAI's ({why}); correct the address, or name the model."
        )

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self._most), self.host, self.port, ssl=self.tls
            )
        except OSError as error:
            why, remedy = (
                printable(error.strerror or error),
                "start the server or correct the address",
            )
        except UnicodeError:
            why, remedy = "it is no valid host name", "correct the address"
        else:
            return connection
        raise EndpointError(f"{self.url} cannot be reached ({why}); {remedy}.")

    async def close(self) -> None:
        """End all idle connections."""
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # transports close in the loop's next turn
