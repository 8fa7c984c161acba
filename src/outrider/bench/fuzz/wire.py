"""A small HTTP client on raw sockets, which can be rude: it pauses, pipelines, and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

PIECE = 1 << 16


class NoAnswer(Exception):
    """The connection ended before the answer did."""


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False
    kept: bool = False
    """Whether the connection can be used again."""

    @property
    def streamed(self) -> bool:
        """Whether it is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


class _Reader:
    """Fills an answer by httptools' callbacks."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answer.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.answer.body += body

    def on_message_complete(self) -> None:
        self.answer.whole = True
        self.answer.kept = self.parser.should_keep_alive()


class Connection:
    """One connection to a server, opened when it is first used and whenever it has ended."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.name = parts.netloc
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, without waiting."""
        if self.writer is not None:
            self.writer.transport.abort()
        self.reader = self.writer = None

    def head(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """A request's head."""
        given = {"Host": self.name, "Content-Type": "application/json", **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: bytes, leaves: int | None = None) -> Answer:
        """Send a body; the answer, cut off after ``leaves`` bytes where that is given.

        Raises:
            NoAnswer: the connection ended first.
            OSError: there is no connection.
        """
        head = self.head("POST", path, {"Content-Length": str(len(body))})
        await self.send(head + body)
        return await self.answer(leaves)

    async def get(self, path: str) -> Answer:
        """Ask for a path.

        Raises:
            NoAnswer: the connection ended first.
            OSError: there is no connection.
        """
        await self.send(self.head("GET", path))
        return await self.answer()

    async def answer(self, leaves: int | None = None) -> Answer:
        """Read one answer; the connection is closed where the answer or the client ends it.

        Raises:
            NoAnswer: the connection ended first.
        """
        assert self.reader is not None
        found = _Reader()
        answer = found.answer
        size = 0
        while not answer.whole and (leaves is None or size < leaves):
            data = await self.reader.read(PIECE)
            if not data:
                self.close()
                raise NoAnswer(f"after {size} bytes")
            size += len(data)
            try:
                found.parser.feed_data(data)
            except httptools.HttpParserError as error:
                self.close()
                raise NoAnswer(f"no HTTP: {error}") from None
        if not answer.kept:
            self.close()
        return answer
