"""Answers calls, whole or as a stream of server-sent events, until the client disconnects."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json

from ..errors import ConfigError, OutriderError, RequestError
from .api_call import ApiCall, merged
from .errors import GONE, Refusal, error_body
from .protocol import to_refusal

T = TypeVar("T")
logger = logging.getLogger("outrider")
LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
"""JSON escapes of characters that some clients take for line ends."""


async def answered(call: ApiCall[Any], http: Request) -> Response:
    """Return the answer to a call, whole or as a stream; raise failures before the first chunk."""
    http.state.call = call
    if call.body.stream_options is not None and not call.body.stream:
        raise Refusal("stream_options needs stream: true.", "stream_options")
    with leaving(call):
        await unless_gone(http, call.prepare())
        http.state.held.close()  # the body; generating may take long
        if not call.body.stream:
            return await unless_gone(http, whole(call))
        chunks = call.chunks()
        first = await unless_gone(http, anext(chunks))
    return StreamingResponse(
        events(call, first, chunks), media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )  # fmt: skip


@contextlib.contextmanager
def leaving(call: ApiCall[Any]) -> Iterator[None]:
    """Take a failing call out of the queue, and raise its error with the client's field names."""
    try:
        yield
    except BaseException as error:
        call.lease.close()
        told = to_refusal(error) if isinstance(error, ConfigError) else error
        if isinstance(told, RequestError):
            raise call.told(told) from None
        raise


async def unless_gone(http: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``; cancel it and raise Refusal if the client is gone first."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(watch())
    try:
        done, _ = await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise Refusal("the client disconnected.", status=GONE)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(BaseException):
                await task


async def whole(call: ApiCall[Any]) -> Response:
    """Run a call, and return the whole answer; one that lists much is built in a thread."""
    async for _ in merged(call.runs()):
        pass
    if call.lists_much:
        text = await call.service.texts.slow(lambda: to_json(call.build()))
        answer = Response(text, media_type="application/json")
    else:
        answer = JSONResponse(call.build())
    call.record()
    return answer


async def events(
    call: ApiCall[Any], first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[bytes]:
    """Yield server-sent events; a failure midway is sent as error events and ends the stream."""
    named = call.named_events
    yield event(first, named)
    try:
        async for chunk in rest:
            yield event(chunk, named)
        if call.stream_options.include_usage:
            yield event(call.last_chunk(), named)
        call.record()
    except OutriderError as error:
        call.error = str(error_body(error)["error"]["code"])
        for chunk in call.failed(error):
            yield event(chunk, named)
    except Exception as error:
        call.error = type(error).__name__
        logger.exception("a stream failed")
        for chunk in call.failed(OutriderError("the server failed; its log says why.")):
            yield event(chunk, named)
    if not named:
        yield b"data: [DONE]\n\n"


def event(content: dict[str, Any], named: bool = False) -> bytes:
    """Return one server-sent event; if ``named``, its name is the content's type."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {content['type']}\n".encode() if named else b""
    return name + b"data: " + text.translate(LINE_ENDS).encode("utf-8", "replace") + b"\n\n"
