"""One connection: its clocks, its limits, and requests that could be read in two ways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from outrider.server.access import Access
from outrider.server.errors import GONE
from outrider.server.http import (
    LARGEST_HEAD,
    MOST_FIELDS,
    MOST_PIECES,
    RESERVED_FILES,
    SPARE,
    bounded,
    files,
)  # fmt: skip
from outrider.server.security import Gate
from outrider.server.settings import Settings

HOST = b"Host: localhost\r\n"
REQUEST = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/x HTTP/1.1\r\n" + HOST
CHUNKED = b"Transfer-Encoding: chunked\r\n"
SLOW, PATIENCE = 0.2, 20
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Answers with the length of the body; /stream sends without end, /slow takes a while.

    ``failures`` are the statuses of calls that failed, in the order of their ends.
    """

    def __init__(self) -> None:
        self.bodies: list[int] = []
        self.failures: list[int] = []
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = scope["state"].get("body")
        body = (await receive())["body"] if body is None else body
        self.bodies.append(len(body))
        if scope["path"] == "/broken":
            raise RuntimeError
        if scope["path"] == "/slow":
            await asyncio.sleep(2 * SLOW)
        text = str(len(body)).encode()
        headers = [] if scope["path"] == "/stream" else [(b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] != "/stream":
            await send({"type": "http.response.body", "body": text})
            return
        watch = asyncio.ensure_future(receive())
        while not watch.done():
            for _ in range(10):  # as a step of the engine brings several tokens at once
                await send({"type": "http.response.body", "body": b"x" * 500, "more_body": True})
            await asyncio.sleep(0)
        self.gone.set()


@contextlib.asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[tuple[App, Callable[[], Awaitable[Streams]]]]:
    """An app behind the gate and the protocol, and what connects to it."""
    app = App()
    patient = {"header_timeout": PATIENCE, "body_timeout": PATIENCE}
    settings = Settings(names=("x",), **{**patient, **limits})
    opened: list[Streams] = []
    config = uvicorn.Config(
        Access(Gate(app, settings), app.failures.append), port=0, log_config=None, lifespan="off",
        http=bounded(settings), timeout_graceful_shutdown=1, ws="none",
    )  # fmt: skip
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def connect() -> Streams:
        opened.append(await asyncio.open_connection("127.0.0.1", port))
        return opened[-1]

    try:
        yield app, connect
    finally:
        for _, writer in opened:
            writer.transport.abort()
        server.should_exit = True
        await running


async def asked(connect: Callable[[], Awaitable[Streams]], data: bytes) -> bytes:
    """Everything that comes back until the server closes."""
    reader, writer = await connect()
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    return await asyncio.wait_for(reader.read(), PATIENCE)


def refused(answer: bytes, status: int) -> str:
    """The message of an answer that is an error, has an id, and closes the connection."""
    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head
    assert head.count(b"\r\nx-request-id: ") == 1
    return str(json.loads(text)["error"]["message"])


def test_whoever_is_slow_is_hung_up_on_and_nobody_else() -> None:
    async def work() -> None:
        async with serving(header_timeout=SLOW, body_timeout=SLOW) as (_, connect):
            reader, writer = await connect()
            for _ in range(2):  # the second over the same connection
                writer.write(REQUEST.replace(b"/ ", b"/slow ", 1))
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                await reader.readexactly(1)
            writer.write(REQUEST[:9])
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
            assert await asked(connect, b"") == b""
            assert await asked(connect, b"\r\n") == b""
            answer = await asked(connect, POST + b"Content-Length: 9\r\n\r\nabc")
            assert "too long" in refused(answer, 408)

    asyncio.run(work())


def test_a_beginning_behind_a_request_is_not_waited_for() -> None:
    async def work() -> None:
        async with serving() as (_, connect):
            for behind in (REQUEST[:9], REQUEST * 5000):
                answer = await asked(connect, REQUEST + behind)
                assert answer.count(b"HTTP/1.1") == 1
                assert answer.startswith(b"HTTP/1.1 200")

    asyncio.run(work())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (POST + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n", 400),
        (POST + CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\na", 400),
        (POST + b"Content-Length: +1\r\n\r\na", 400),
        (POST + b"Content-Length: 99999999999999999999999\r\n\r\na", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: identity\r\n\r\n" + REQUEST, 400),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 400),
        (POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n0\r\n\r\n", 400),
        (POST + CHUNKED + b"\r\nfffffffffffffffff\r\nx", 400),
        (POST + CHUNKED + b"\r\n-1\r\nx", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST * 2 + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"A: b\r\n c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\0b\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n" + HOST + b"\r\n", 400),
        (b"GET http:// HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"NONSENSE / HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n" * MOST_FIELDS + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"b" * LARGEST_HEAD + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 300_000, 431),
        (POST + CHUNKED + b"\r\n0\r\n" + b"a: b\r\n" * MOST_FIELDS, 431),
        (POST + b"Content-Length: 5000000\r\n\r\n", 413),
        (REQUEST[:-2] + b"Content-Length: 5\r\n\r\n", 400),
        (REQUEST[:-2] + CHUNKED + b"\r\n1\r\na\r\n", 400),
        (b"POST /health HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n", 400),
    ],
)  # fmt: skip
def test_doubtful_requests_are_refused(data: bytes, status: int) -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            assert refused(await asked(connect, data), status).endswith(".")
            assert app.bodies == []

    asyncio.run(work())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("end", ["closed", "reset", "half closed"])
@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 9\r\n\r\nabc",
        POST + b"Content-Length: 9\r\n\r\n",
        POST + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n",
        POST + CHUNKED + b"\r\n5\r\nab",
        POST + CHUNKED + b"\r\n3\r\nabc\r\n",
        POST + CHUNKED + b"\r\n3\r\nabc\r\n0\r\n",
        POST.replace(b"1.1", b"1.0") + b"Content-Length: 9\r\n\r\nabc",
        REQUEST.replace(b"/ ", b"/stream ", 1),
        REQUEST.replace(b"/ ", b"/stream ", 1) * 2,
    ],
)
def test_what_a_client_breaks_off_is_its_own_failure(
    data: bytes, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            for count in range(1, 4):
                _, writer = await connect()
                writer.write(data)
                await asyncio.sleep(0.02)
                if end == "closed":
                    writer.close()
                elif end == "reset":
                    writer.transport.abort()
                else:
                    writer.write_eof()
                await until(lambda count=count: len(app.failures) == count)  # type: ignore[misc]
            assert app.failures == [GONE] * 3
            assert b"/stream" in data or app.bodies == []

    with caplog.at_level(logging.INFO, "outrider"):
        asyncio.run(work())
    lines = [record.getMessage() for record in caplog.records if record.name == "outrider"]
    uploads = [line for line in lines if "method=POST" in line]
    assert len(uploads) == (0 if b"/stream" in data else 3)
    assert all(f"status={GONE} " in line for line in uploads)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("head", [b"", b"GET / HTT", b"POST /v1/x HTTP/1.1\r\nHost: loc"])
def test_who_leaves_in_a_head_has_not_called(head: bytes) -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            _, writer = await connect()
            writer.write(head)
            writer.close()
            await asked(connect, REQUEST.replace(b"1.1", b"1.0"))
            assert app.failures == []

    asyncio.run(work())


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"zz\r\n", 400), (b"3\r\nabc\r\nzz\r\n", 400), (b"1\r\nx\r\n" * 9999, 400)],
)
def test_a_body_that_is_refused_on_its_way_counts_once(
    body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            head = POST + b"X-Request-Id: mine\r\n" + CHUNKED + b"\r\n"
            answer = await asked(connect, head + body)
            message = refused(answer, status)
            assert b"\r\nx-request-id: mine\r\n" in answer
            await until(lambda: bool(app.failures))
            assert app.failures == [status]
            (line,) = (r.getMessage() for r in caplog.records if r.name == "outrider")
            assert f"request_id=mine method=POST path=/v1/x status={status} " in line
            assert json.dumps(message) in line

    with caplog.at_level(logging.INFO, "outrider"):
        asyncio.run(work())


def test_a_failure_of_the_server_has_the_calls_id(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            mine = REQUEST.replace(b"/ ", b"/broken ", 1)[:-2] + b"X-Request-Id: mine\r\n\r\n"
            reader, writer = await connect()
            writer.write(mine)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 500 ")
            assert b"\r\nx-request-id: mine\r\n" in head
            assert app.failures == [500]
            writer.write(b"nonsense")  # which has no id of its own
            found = await asyncio.wait_for(reader.read(), PATIENCE)
            assert b"mine" not in found

    asyncio.run(work())
    assert "RuntimeError" in caplog.text


def test_a_body_in_tiny_pieces_is_refused_after_some() -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            piece = b"1\r\nx\r\n"
            answer = await asked(connect, POST + CHUNKED + b"\r\n" + piece * 500_000)
            assert "pieces of a few bytes" in refused(answer, 400)
            assert app.bodies == []
            reader, writer = await connect()
            writer.write(POST + CHUNKED + b"\r\n" + piece * MOST_PIECES + b"0\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            assert app.bodies == [MOST_PIECES]

    asyncio.run(work())


def test_trailers_are_no_headers() -> None:
    seen: list[Any] = []

    async def work() -> None:
        async with serving() as (app, connect):
            original = app.__class__.__call__

            async def spy(self: App, scope: Any, receive: Any, send: Any) -> None:
                seen.extend(name for name, _ in scope["headers"])
                await original(self, scope, receive, send)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(App, "__call__", spy)
                reader, writer = await connect()
                writer.write(POST + CHUNKED + b"\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
                await reader.readuntil(b"\r\n\r\n")

    asyncio.run(work())
    assert seen == [b"host", b"transfer-encoding"]


def test_upgrades_are_declined_and_their_bodies_kept() -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            reader, writer = await connect()
            asks = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
            for _ in range(2):
                writer.write(POST + asks + b"Content-Length: 3\r\n\r\nabc")
                assert (await reader.readuntil(b"\r\n\r\n3")).startswith(b"HTTP/1.1 200")
            assert app.bodies == [3, 3]

    asyncio.run(work())


def test_a_body_may_wait_for_leave() -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            reader, writer = await connect()
            writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"abc")
            assert (await reader.readuntil(b"\r\n\r\n3")).startswith(b"HTTP/1.1 200")
            expects = POST + b"Expect: 100-continue\r\nContent-Length: 5000000\r\n\r\n"
            refused(await asked(connect, expects), 413)
            assert app.bodies == [3]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "found"),
    [
        (1024, 4096, 1024, 1024),
        (1024, 1024, 1024, 1024 - SPARE - RESERVED_FILES),
        (1024, -1, 5000, 5000),
        (-1, -1, 5000, 5000),
        (4096, 4096, 1024, 1024),
        (64, 64, 1024, 1),
    ],
)
def test_connections_fit_the_limit_on_open_files(
    soft: int, hard: int, wanted: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert files(wanted) == found
    assert all(new <= hard or hard == -1 for new, _ in raised)


def test_http_1_0_gets_a_stream_without_chunks() -> None:
    async def work() -> None:
        async with serving() as (_, connect):
            reader, writer = await connect()
            writer.write(b"GET /stream HTTP/1.0\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"chunked" not in head
            assert b"connection: close" in head
            assert await reader.readexactly(5000) == b"x" * 5000

    asyncio.run(work())


def test_a_stream_that_nobody_reads_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving(write_timeout=SLOW) as (app, connect):
            _, writer = await connect()
            writer.write(REQUEST.replace(b"/ ", b"/stream ", 1))
            await asyncio.wait_for(app.gone.wait(), PATIENCE)

    asyncio.run(work())
    assert not caplog.records


def test_nothing_is_written_to_clients_that_left(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving() as (app, connect):
            for end in ("eof", "reset"):
                app.gone.clear()
                reader, writer = await connect()
                writer.write(REQUEST.replace(b"/ ", b"/stream ", 1))
                await reader.readexactly(100)
                await asyncio.sleep(0.05)  # the server's buffer fills
                if end == "eof":
                    writer.write_eof()
                else:
                    writer.transport.abort()
                await asyncio.wait_for(app.gone.wait(), PATIENCE)

    with caplog.at_level(logging.DEBUG, "asyncio"):
        asyncio.run(work())
    assert not [r for r in caplog.records if "socket.send()" in r.getMessage()]


def test_idle_connections_make_room_and_busy_ones_keep_it() -> None:
    async def work() -> None:
        async with serving(max_connections=4, write_timeout=PATIENCE) as (_, connect):
            idle = [await connect() for _ in range(100)]
            busy = [await connect() for _ in range(4)]
            for reader, writer in busy:
                writer.write(REQUEST.replace(b"/ ", b"/stream ", 1))
                await reader.readexactly(100)
            assert await asyncio.wait_for(idle[0][0].read(), PATIENCE) == b""
            assert "connection limit" in refused(await asked(connect, REQUEST), 503)
            reader, writer = await connect()
            writer.write(REQUEST.replace(b"/ ", b"/health ", 1))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    asyncio.run(work())
