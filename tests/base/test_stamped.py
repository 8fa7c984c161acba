"""The HTTP client of load tests, audits and exporters: kept connections, and addresses."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from typing import Any

import pytest

from benchmarks.stub import port_of
from outrider.base.outside import stamped as clients
from outrider.base.outside.stamped import Client
from outrider.errors import ConfigError, EndpointError
from tests.support.peering import Answer, drips, peer, says


def test_a_kept_connection_that_has_ended_is_replaced_once() -> None:
    """The server ends each connection at its second request, before or within the answer."""
    heard: list[int] = []

    def server(part: bytes) -> Any:
        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(0)
            with closing(writer), suppress(asyncio.IncompleteReadError):  # the client has gone
                while await reader.readuntil(b"\r\n\r\n"):
                    heard[-1] += 1
                    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
                    writer.write(whole if heard[-1] == 1 else part)
                    if heard[-1] > 1:
                        break

        return connection

    async def main(part: bytes) -> list[bytes]:
        serving = await asyncio.start_server(server(part), "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{port_of(serving)}")
        try:
            return [(await client.ask("/")).body for _ in range(3)]
        finally:
            await client.close()
            serving.close()
            await asyncio.sleep(0.02)

    assert asyncio.run(main(b"")) == [b"ok"] * 3
    assert heard == [2, 2, 1]
    heard.clear()
    with pytest.raises(EndpointError, match="ended before the answer did"):
        asyncio.run(main(b"HTTP/1.1 200 OK\r\n"))
    assert heard == [2]


def test_a_new_connection_without_an_answer_is_not_tried_again() -> None:
    tries: list[int] = []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tries.append(len(await reader.readuntil(b"\r\n\r\n")))
        writer.close()

    async def main() -> None:
        serving = await asyncio.start_server(connection, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{port_of(serving)}")
        try:
            await client.ask("/")
        finally:
            await client.close()
            serving.close()
            await asyncio.sleep(0.02)

    with pytest.raises(EndpointError, match="ended before an answer began"):
        asyncio.run(main())
    assert len(tries) == 1


@pytest.mark.parametrize("url", ["", "http://", "ftp://host", "http://[", "http://host:70000"])
def test_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Client(url)


def test_an_address_may_end_in_v1() -> None:
    assert Client("https://host/api/v1/").url == "https://host/api"


@pytest.mark.parametrize(
    "answer",
    [
        drips(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        drips(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        drips(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=range(4),
)
def test_a_question_ends_however_the_answer_trickles(answer: Answer) -> None:
    with peer(answer) as (url, _), pytest.raises(EndpointError, match="does not answer within"):
        asyncio.run(Client(url).ask("/", seconds=0.3))


@pytest.mark.parametrize(
    "answer",
    [
        drips(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, 0.0),
        drips(b"HTTP/1.1 200 OK\r\n", b"X: " + b"x" * 1000 + b"\r\n", 0.0),
        drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0.0),
    ],
    ids=range(3),
)
def test_an_answer_without_end_is_cut_off(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_BYTES", 1 << 20)
    with peer(answer) as (url, _), pytest.raises(EndpointError, match="the answer"):
        asyncio.run(Client(url).ask("/", seconds=30))


def test_a_redirect_is_an_answer_and_the_key_stays_here() -> None:
    async def status(url: str) -> int:
        client = Client(url, "secret")
        answer = await client.ask("/")
        await client.close()
        return answer.status

    with peer(says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")) as (other, stolen):
        head = f"HTTP/1.1 307 x\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n".encode()
        with peer(says(head)) as (url, asked):
            assert asyncio.run(status(url)) == 307
    assert b"Bearer secret" in asked[0]
    assert not stolen
