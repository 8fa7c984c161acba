"""A small HTTP client on raw sockets, which can be rude: it pauses, pipelines, and leaves."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

PIECE = 1 << 16


class NoAnswer(Exception):
    """The connection ended before the answer did."""


@dataclass
class Answer:
    """An answer as far as it came; httptools' parser fills it by its callbacks."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    whole: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True

    @property
    def streamed(self) -> bool:
        """True for a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")


def request(
    host: str, path: str, body: bytes = b"", method: str = "POST", **headers: object
) -> bytes:
    """Return the bytes of a request; in the names of headers an underscore stands for a dash."""
    fields = {"Host": host, "Content_Type": "application/json", **headers}
    if "Transfer_Encoding" not in fields:
        fields.setdefault("Content_Length", len(body))
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "\r\n"]).encode("latin-1") + body


class Connection(AbstractAsyncContextManager["Connection", None]):
    """One connection to a server, opened when it is first used and whenever it has ended."""

    def __init__(self, url: str) -> None:
        self.url = urlsplit(url)
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, without waiting."""
        if self.streams is not None:
            self.streams[1].transport.abort()
        self.streams = None

    async def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.url.hostname, self.url.port)
        self.streams[1].write(data)
        await self.streams[1].drain()

    async def post(self, path: str, body: bytes, leaves: int | None = None) -> Answer:
        """Send a body and return the answer, cut off after ``leaves`` bytes where that is given."""
        await self.send(request(self.url.netloc, path, body))
        return await self.answer(leaves)

    async def answer(self, leaves: int | None = None) -> Answer:
        """Read one answer; the connection is closed where the answer or the client ends it."""
        assert self.streams is not None
        answer, size = Answer(), 0
        parser = httptools.HttpResponseParser(answer)
        while not answer.whole and (leaves is None or size < leaves):
            data = await self.streams[0].read(PIECE)
            size += len(data)
            try:
                if not data:
                    raise NoAnswer(f"after {size} bytes")
                parser.feed_data(data)
            except (NoAnswer, httptools.HttpParserError) as error:
                self.close()
                raise NoAnswer(str(error)) from None
        answer.status = parser.get_status_code()
        if not answer.whole or answer.headers.get("connection") == "close":
            self.close()
        return answer
