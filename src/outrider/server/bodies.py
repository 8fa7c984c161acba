"""Reads bodies of calls as JSON at a bounded cost, long ones outside the event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from ..errors import shown
from .errors import Refusal

LONG_BODY = 1 << 16
"""Bodies of this many bytes or more are read in a thread."""
MOST_BRACKETS = 1 << 16
"""Most lists and objects in a body; each takes twenty times the memory of its text."""
MOST_FIELDS = 1 << 17
"""Most fields of all objects in a body together."""
PIECE = 1 << 16
"""Bytes that are scanned at a time."""
READER = ThreadPoolExecutor(1, "outrider-bodies")
"""One thread: several long bodies at once take no more memory than one."""
REASONS = {
    "recursion limit": "it nests too deeply",
    "hex escape": "a text has lone surrogates; send UTF-8",
    "out of range": "a number has too many digits",
    "unicode": "it is not UTF-8",
}
"""Clearer reasons, keyed by a word of the parser's message."""

BodyModel = TypeVar("BodyModel", bound=BaseModel)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def value_of(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError: it is no JSON, or has NaN.

    Strings are not cached: the parser's cache outlives the body, and its entries among the objects
    of a large body would keep Python from returning their memory.
    """
    return from_json(text, allow_inf_nan=False, cache_strings="none")


def parse(raw: bytes) -> Any:
    """Return the value of a JSON text. Raises Refusal: it is no JSON, or has too many parts."""
    if not raw.strip():
        raise Refusal("the body is empty; send a JSON object.")
    _check_size(raw)
    try:
        return value_of(raw)
    except ValueError as error:
        message = str(error)
        reason = next((text for word, text in REASONS.items() if word in message), message)
        raise Refusal(f"the body is not JSON: {reason}.") from None


def _check_size(raw: bytes) -> None:
    """Refuse a text with too many lists, objects or fields."""
    if raw.count(b"{") + raw.count(b"[") <= MOST_BRACKETS and raw.count(b":") <= MOST_FIELDS:
        return
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = fields = quotes = 0
    for start in range(0, len(bare), PIECE):
        parts = bare[start : start + PIECE].split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])  # of quotes
        brackets += outside.count(b"{") + outside.count(b"[")
        fields += outside.count(b":")
        quotes += len(parts) - 1
        if brackets > MOST_BRACKETS or fields > MOST_FIELDS:
            raise Refusal(
                f"the body has more than {MOST_BRACKETS} lists and objects or {MOST_FIELDS} "
                "fields; send less in one call."
            )


def read(model: type[BodyModel], raw: bytes) -> BodyModel:
    """Return the fields of a body. Raises Refusal, RequestValidationError: it is wrong."""
    fields = parse(raw)
    if not isinstance(fields, dict):
        raise Refusal("the body is not a JSON object; send one.")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
    raise RequestValidationError(problems)


def check_type(header: str | None) -> None:
    """Refuse a body that is not declared as JSON: pages of other sites can send those."""
    message = Message()
    message["content-type"] = header or "none"
    kind = message.get_content_type()
    if header is None or not (kind == "application/json" or kind.endswith("+json")):
        what = "no content type" if header is None else f"content type {shown(header)}"
        raise Refusal(f"the body has {what}; send it as application/json.")


class _ReadRequest(Request):
    """A request whose body has been read."""

    model: BaseModel

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> Any:
        return self.model


class BodyRoute(APIRoute):
    """A route whose body is read here, and reaches its function as a model."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model: Any = self.body_field.field_info.annotation

        async def handle(call: Request) -> Response:
            read = _ReadRequest(call.scope, call.receive)
            read.model = await _read_body(model, call)
            return await handler(read)

        return handle


async def _read_body(model: type[BodyModel], call: Request) -> BodyModel:
    """Return the fields of a call's body; the bytes, which the gate has read, are freed."""
    check_type(call.headers.get("content-type"))
    raw: bytes = call.scope["state"].pop("body", b"")
    call.state.body_bytes = len(raw)
    if len(raw) < LONG_BODY:
        return read(model, raw)
    return await asyncio.get_running_loop().run_in_executor(READER, read, model, raw)
