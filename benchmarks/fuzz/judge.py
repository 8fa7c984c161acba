"""The rules for one answer: which status is right, and how errors and streams look."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .bodies import CHAT, COMPLETIONS, MESSAGES_PATH, RESPONSES, Case
from .wire import Answer

LONGEST_MESSAGE = 400
ERROR_FIELDS = {"message", "type", "param", "code"}
EXCEPTIONS = ("Traceback", "Error:", "panic")
SERVER_ERRORS = ("server_error", "service_unavailable_error")
EARLY = 0.9
"""A 408 may come at this share of the timeout: the server's clock starts after the client's."""


def faults(case: Case, answer: Answer, seconds: float, timeout: float | None) -> list[str]:
    """Everything that is wrong with an answer that is whole, one sentence each.

    It took ``seconds``; ``timeout`` is the server's own limit, None where it is not known.
    """
    if answer.status >= 500:
        return [f"{answer.status}: {shown(answer)}"]
    if answer.status == 200:
        read = (_events if case.path in ENDS else _stream) if answer.streamed else _whole
        return list(read(case, answer))
    wrong = list(_error(parsed(bytes(answer.body)), case.path))
    limit = shortest(case.raw, timeout)
    if answer.status == 408 and limit is not None and seconds < EARLY * limit:
        wrong.append(f"408 after {seconds:.3f} s of {limit:g} s")
    if not 400 <= answer.status < 500:
        wrong.append(f"the status is {answer.status}")
    return wrong


def shown(answer: Answer) -> str:
    """The start of a body."""
    return bytes(answer.body[:300]).decode("utf-8", "replace")


def parsed(raw: bytes) -> Any:
    """The JSON of some bytes, strictly; None where it is none."""
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=lambda name: int(name))
    except (ValueError, RecursionError):
        return None


def shortest(raw: bytes, timeout: float | None) -> float | None:
    """The least seconds after which a call may time out, None where it is not known."""
    limits = [] if timeout is None else [timeout]
    with suppress(ValueError, RecursionError, AttributeError, TypeError, OverflowError):
        limits.append(float(json.loads(raw).get("timeout")))
    return min(limits, default=None)


def _error(value: Any, path: str) -> Iterator[str]:
    """Yield what is wrong with the JSON of an error, which has the form of its API."""
    error = value.get("error") if isinstance(value, dict) else None
    anthropic = path.startswith(MESSAGES_PATH)
    needed = {"message", "type"} if anthropic else ERROR_FIELDS
    if not isinstance(error, dict) or not error.keys() >= needed:
        yield f"no error of the API's form: {str(value)[:300]}"
        return
    if anthropic and value.get("type") != "error":
        yield f"the error is not called so: {str(value)[:300]}"
    error = {"param": None, "code": "", **error}
    message, param = error["message"], error["param"]
    if not isinstance(message, str) or not message:
        yield f"the error has no message: {error}"
    elif len(message) > LONGEST_MESSAGE:
        yield f"the message has {len(message)} characters: {message[:200]}"
    elif any(word in message for word in EXCEPTIONS):
        yield f"the message shows an exception: {message}"
    if not isinstance(param, str | None):
        yield f"param is {param!r}"
    if not isinstance(error["type"], str) or not isinstance(error["code"], str | int):
        yield f"type is {error['type']!r} and code {error['code']!r}"


LISTS = ("/v1/completions/render", "/generate")
"""Paths whose answers may be lists."""


def _whole(case: Case, answer: Answer) -> Iterator[str]:
    """Yield what is wrong with an answer that is no stream."""
    value = parsed(bytes(answer.body))
    if not isinstance(value, dict | list):
        yield f"the answer is no JSON: {shown(answer)}"
    elif isinstance(value, list):
        if case.path not in LISTS:
            yield f"the answer is a list: {shown(answer)}"
    elif case.path in (COMPLETIONS, CHAT):
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices:
            yield f"the answer has no choices: {shown(answer)}"
        elif any(not choice.get("finish_reason") for choice in choices):
            yield f"a choice has no finish_reason: {shown(answer)}"
    elif case.path == RESPONSES and value.get("status") not in ("completed", "incomplete"):
        yield f"the response has not ended: {shown(answer)}"
    elif case.path == MESSAGES_PATH and not value.get("stop_reason"):
        yield f"the message has no stop_reason: {shown(answer)}"


ENDS = {RESPONSES: ("response.completed", "response.incomplete", "response.failed"),
        MESSAGES_PATH: ("message_stop", "error")}  # fmt: skip
"""By path: the last event of a stream of named events."""


def _events(case: Case, answer: Answer) -> Iterator[str]:
    """Yield what is wrong with a stream of named events."""
    *events, rest = bytes(answer.body).split(b"\n\n")
    names = []
    for event in events:
        name, _, data = event.partition(b"\ndata: ")
        chunk = parsed(data) if name.startswith(b"event: ") else None
        if not isinstance(chunk, dict) or chunk.get("type") != name[len("event: ") :].decode():
            yield f"an event is not what it says: {event[:300]!r}"
            continue
        names.append(chunk["type"])
        if "server_error" in str(chunk.get("error")) or chunk.get("code") == "500":
            yield f"the stream ended with {chunk}"
    if rest or names[-1:] == [] or names[-1] not in ENDS[case.path]:
        yield f"the stream does not end as it should: ...{bytes(answer.body[-200:])!r}"


def _stream(case: Case, answer: Answer) -> Iterator[str]:
    """Yield what is wrong with a stream of chunks."""
    events = bytes(answer.body).split(b"\n\n")
    if events[-1] != b"" or events[-2:-1] != [b"data: [DONE]"]:
        yield f"the stream does not end in [DONE]: ...{bytes(answer.body[-200:])!r}"
    for event in events[:-2]:
        chunk = parsed(event.removeprefix(b"data: ")) if event.startswith(b"data: ") else None
        if not isinstance(chunk, dict):
            yield f"an event is no JSON: {event[:300]!r}"
        elif "error" in chunk:
            yield from _error(chunk, case.path)
            if any(kind in str(chunk["error"]) for kind in SERVER_ERRORS):
                yield f"the stream ended with {chunk['error']}"
