"""Headers that do not come in time."""

import asyncio
from typing import Any

import uvicorn

from outrider.server.http import bounded

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.4)  # an answer may take longer than headers
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


def test_whoever_is_slow_is_hung_up_on_and_nobody_else() -> None:
    async def work() -> None:
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", http=bounded(0.2))
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # the second over the same connection
            writer.write(REQUEST)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(REQUEST[:9])
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST + REQUEST[:9])  # a beginning that comes along with a whole request
        await reader.readuntil(b"\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        server.should_exit = True
        await running

    asyncio.run(work())
