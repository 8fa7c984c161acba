"""Errors in OpenAI's form: always message, type, param and code."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from .. import errors
from ..errors import OutriderError, RequestError

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error",
    409: "conflict_error", 413: "invalid_request_error", 415: "invalid_request_error",
    422: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error",
    500: "server_error", 503: "service_unavailable_error",
}  # fmt: skip
ANTHROPIC = {
    name: name
    for name in ("invalid_request_error", "authentication_error", "permission_error",
                 "not_found_error", "rate_limit_error", "timeout_error")
} | {"service_unavailable_error": "overloaded_error"}  # fmt: skip
"""Anthropic's types of errors, keyed by ours; all others are "api_error"."""
STATUSES: tuple[tuple[tuple[type[OutriderError], ...], int], ...] = (
    ((errors.WorkerError,), 503),
    ((errors.GenerationError,), 500),
    ((RequestError, errors.ConfigError, errors.MemoryBudgetError), 400),
)
"""The first entry that has an error's class gives its status; other errors have 500."""
GONE = 499
"""The status of a call whose client went away, as in nginx."""
METHODS = ("GET", "HEAD", "POST", "DELETE")
EARLY_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    405: {"Allow": ", ".join(METHODS)},
    **{status: {"Connection": "close"} for status in (400, 408, 413, 503)},
}
"""Headers, keyed by status, for a call that is refused before its body is read."""
LONGEST_SENTENCE = 300
LONGEST_END = 100
CUT = " ... "
"""Stands in for the middle of a sentence that is too long; its end names the remedy."""


class ErrorFields(BaseModel):
    """The fields of every error."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorFields


MEANINGS: dict[int | str, str] = {
    400: "The request is wrong.", 401: "There is no valid API key.", 404: "No such path or model.",
    408: "It took too long.", 413: "The body is too large.", 429: "The queue is full.",
    503: "The engine is starting, or the server is shutting down.", "default": "Another error.",
}  # fmt: skip
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in MEANINGS.items()
}
"""For the published schema; "default" replaces FastAPI's 422, which this server never sends."""


class Refusal(RequestError):
    """A call that the server refuses or gives up; ``code`` is OpenAI's, if it has one."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message, param)
        self.status = status
        self.code = code


def status_of(error: OutriderError) -> int:
    """Return the HTTP status of an error of the engine or the server."""
    if isinstance(error, Refusal):
        return error.status
    return next((status for kinds, status in STATUSES if isinstance(error, kinds)), 500)


def error_body(error: OutriderError) -> dict[str, Any]:
    """Return the JSON of an error of the engine or the server."""
    status, message = status_of(error), str(error)
    if len(message) > LONGEST_SENTENCE:
        start = LONGEST_SENTENCE - LONGEST_END - len(CUT)
        message = f"{message[:start]}{CUT}{message[-LONGEST_END:]}"
    return {
        "error": {
            "message": message, "type": TYPES.get(status, "server_error"),
            "param": getattr(error, "param", None), "code": getattr(error, "code", None) or status,
        }
    }  # fmt: skip


def of_messages(body: dict[str, Any], id: str | None = None) -> dict[str, Any]:
    """Return an error body in Anthropic's form, given one in OpenAI's."""
    error = body["error"]
    told = {"type": ANTHROPIC.get(error["type"], "api_error"), "message": error["message"]}
    return {"type": "error", "error": told, "request_id": id}


def response(
    error: OutriderError,
    headers: Mapping[str, str] | None = None,
    status: int | None = None,
    path: str = "",
    id: str | None = None,
) -> JSONResponse:
    """Return an error response, with Retry-After (seconds) where trying again helps.

    Its form is that of the API that ``path`` belongs to, with the call's ``id`` if it has one.
    """
    status = status or status_of(error)
    retry = {"Retry-After": "1"} if status in (429, 503) else {}
    body = error_body(error)
    body = of_messages(body, id) if is_of_messages(path) else body
    return JSONResponse(body, status, {**retry, **(headers or {})})


def is_of_messages(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path.removeprefix("/v1").split("/")[:2] == ["", "messages"]


VALID = "Input should be a valid "
"""How pydantic's message on a wrong type begins."""


def _read(problem: Mapping[str, Any]) -> tuple[int, int, bool]:
    """Return how far a value was read: how deep, up to which index, and whether its type fits."""
    place = problem["loc"]
    last = place[-1] if place else 0
    return len(place), last if isinstance(last, int) else 0, not problem["msg"].startswith(VALID)


def _is_name(part: str) -> bool:
    """Return whether a part of a place is the user's; pydantic adds the types of union members."""
    return part.isdecimal() or (part.isidentifier() and part != "str" and not part[0].isupper())


def _told(problems: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with a value, given the ``problems`` of each member of a union."""
    first = problems[0]
    if first["type"] == "int_parsing_size":
        return "the number is too large"
    if first["msg"].startswith(VALID):  # then all do
        types = (each["msg"].removeprefix(VALID).split(" or instance")[0] for each in problems)
        return f"input should be a valid {' or '.join(dict.fromkeys(types))}"
    told: str = first["msg"].removeprefix("Value error, ").replace(" after validation", "")
    return told[:1].lower() + told[1:]


def sentence(problems: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """Return one sentence on the first wrong field of a body, and that field."""
    # Every member of a union has a problem; the user meant the one that was read furthest.
    own = [p for p in problems if p["loc"][:1] == problems[0]["loc"][:1]]
    furthest = max(map(_read, own))
    own = [p for p in own if _read(p) == furthest]
    place = [str(part) for part in own[0]["loc"] if part != "body"]
    where, problem = ".".join(filter(_is_name, place)), _told(own)
    told = f"{where}: {problem}." if where else f"the body is wrong: {problem}."
    return told, place[0] if place else None


def _of(request: Request) -> dict[str, Any]:
    """Return the path and id of a call, for its error."""
    id = getattr(request.state, "request_id", None)
    return {"path": request.scope["path"], "id": id}


def install(app: FastAPI) -> None:
    """Give every error of ``app`` the same form."""

    @app.exception_handler(OutriderError)
    async def of_outrider(request: Request, error: OutriderError) -> JSONResponse:
        return response(error, **_of(request))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return response(Refusal(*sentence(error.errors())), **_of(request))

    @app.exception_handler(HTTPException)
    async def of_starlette(request: Request, error: HTTPException) -> JSONResponse:
        messages = {
            404: f"there is no path {request.url.path}; see /openapi.json for all paths.",
            405: f"{request.method} is not allowed for {request.url.path}; see /openapi.json.",
        }
        message = messages.get(error.status_code, str(error.detail))
        refusal = Refusal(message, status=error.status_code)
        return response(refusal, error.headers, **_of(request))
