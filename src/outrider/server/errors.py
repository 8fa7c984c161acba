"""Errors as OpenAI's clients read them: always message, type, param and code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ..errors import (
    ConfigError,
    GenerationError,
    MemoryBudgetError,
    OutriderError,
    RequestError,
    WorkerError,
)  # fmt: skip
from .protocol import ChatRequest, CompletionRequest, Refusal

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error",
    413: "invalid_request_error", 415: "invalid_request_error", 422: "invalid_request_error",
    429: "rate_limit_error", 431: "invalid_request_error", 500: "server_error",
    503: "service_unavailable_error",
}  # fmt: skip
RETRY_SECONDS = 1
LONGEST_SENTENCE = 300
LONGEST_END = 100
CUT = " ... "
"""Characters of a sentence that is too long: its end says what to do."""


class ErrorFields(BaseModel):
    """What every error says."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorFields


MEANINGS: dict[int | str, str] = {
    400: "The request is wrong.", 401: "There is no valid API key.", 404: "Not here.",
    408: "It took too long.", 413: "The body is too large.", 429: "Too much waits.",
    503: "The engine starts, or the server ends.", "default": "Another error.",
}  # fmt: skip
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in MEANINGS.items()
}
"""For the published schema; "default" stands for a 422 that nobody gets here."""


class ServerError(OutriderError):
    """A call that ends with a status of its own.

    Args:
        status: of HTTP.
        message: one sentence: what is wrong and what to do.
        param: the field at fault.
        code: OpenAI's word for it, such as model_not_found.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def to_refusal(error: ConfigError) -> Refusal:
    """Return the error of an option as a refusal of the call's field of that name."""
    text = str(error).removeprefix("SamplingParams: ").removeprefix("StructuredOutputsParams ")
    field = text.partition(" ")[0]
    known = field in CompletionRequest.model_fields or field in ChatRequest.model_fields
    return Refusal(text, field if known else None)


def body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the JSON of an error."""
    kind = TYPES.get(status, "server_error")
    if len(message) > LONGEST_SENTENCE:
        start = LONGEST_SENTENCE - LONGEST_END - len(CUT)
        message = f"{message[:start]}{CUT}{message[-LONGEST_END:]}"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def status_of(error: OutriderError) -> int:
    """Return the HTTP status of an error of the engine or the server."""
    if isinstance(error, ServerError):
        return error.status
    if isinstance(error, Refusal):
        return error.code
    if isinstance(error, WorkerError):
        return 503
    if isinstance(error, GenerationError):
        return 500
    return 400 if isinstance(error, RequestError | ConfigError | MemoryBudgetError) else 500


def error_body(error: OutriderError) -> dict[str, Any]:
    """Return the JSON of an error of the engine or the server."""
    code = error.code if isinstance(error, ServerError) else None
    return body(status_of(error), str(error), getattr(error, "param", None), code)


def response(status: int, content: dict[str, Any]) -> JSONResponse:
    """Return an error response, with Retry-After where trying again helps."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
    return JSONResponse(content, status, headers)


def _depth(problem: Mapping[str, Any]) -> tuple[int, int]:
    """Return how deep in a body a problem lies, and at which index."""
    place = problem.get("loc", ())
    last = place[-1] if place else 0
    return len(place), last if isinstance(last, int) else 0


def sentence(problems: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return one sentence on the first wrong field of a body, and that field."""
    # Of a union each kind has a problem; the one that was read furthest was meant.
    field_of = [problem.get("loc", ())[:1] for problem in problems]
    same = [p for p, name in zip(problems, field_of, strict=True) if name == field_of[0]]
    first = max(same, key=_depth)
    place = [str(part) for part in first.get("loc", ()) if part != "body"]
    if first.get("type") == "json_invalid":
        return (
            f"the body is no JSON: {first.get('ctx', {}).get('error', 'it cannot be read')}.",
            None,
        )
    # Of a union pydantic names every branch behind the field; the field is what helps.
    field = place[0] if place else None
    where = ".".join(part for part in place if part.isidentifier() or part.isdecimal())
    said = str(first.get("msg", "it is wrong")).removeprefix("Value error, ")
    said = said[:1].lower() + said[1:]
    return (f"{where}: {said}." if where else f"the body is wrong: {said}."), field


def install(app: FastAPI) -> None:
    """Give every error of ``app`` the same form."""

    @app.exception_handler(OutriderError)
    async def _known(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, OutriderError)
        return response(status_of(error), error_body(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        message, param = sentence(error.errors())
        return response(400, body(400, message, param))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path} here; see /openapi.json for what there is."
        if error.status_code == 405:
            message = f"{request.method} is not for {request.url.path}; see /openapi.json."
        found = response(error.status_code, body(error.status_code, message))
        found.headers.update(error.headers or {})
        return found

    @app.exception_handler(Exception)
    async def _unknown(_: Request, error: Exception) -> JSONResponse:
        return response(500, body(500, "the server failed; its log says why."))
