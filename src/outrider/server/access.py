"""The outer layer of every call: its id, log line, span, and the count of failures."""

import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import OutriderError
from .errors import GONE, response
from .log import log_call
from .protocol import REQUEST_ID
from .traces import Tracer

HEADER = "x-request-id"
PROBES = frozenset({"/health", "/ready", "/ping"})
"""Probes: not counted as calls or errors, nor logged."""


def request_id(headers: Headers) -> str:
    """Return the id of a call: the client's if it is valid, else a new one."""
    sent = headers.get(HEADER, "")
    return sent if re.fullmatch(REQUEST_ID, sent) else uuid.uuid4().hex


class Access:
    """Gives every call an id, and logs calls that change something or fail.

    It reads two entries of ``scope["state"]``: ``call``, an ``ApiCall`` whose ``facts`` go into the
    log and the span; and ``refused``, the status and message that the connection sent instead of
    the call's answer. If the client disconnects early, the status is ``GONE``; a stream that had
    begun gets the error ``GONE``. ``failed`` is called with the status of every call that fails.
    """

    def __init__(
        self, app: ASGIApp, failed: Callable[[int], None], tracer: Tracer | None = None
    ) -> None:
        self.app = app
        self.failed = failed
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        id = state.setdefault("request_id", request_id(Headers(scope=scope)))
        begin, clock = time.perf_counter(), time.time_ns()
        status: int | None = None
        whole = gone = False

        async def heard() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or (message["type"] == "http.disconnect" and not whole)
            return message

        async def marked(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = GONE if gone else message["status"]
                MutableHeaders(scope=message)[HEADER] = id
            else:
                whole = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, heard, marked)
        except Exception:
            if status is None:
                failure = OutriderError("the server failed; its log says why.")
                await response(failure)(scope, heard, marked)
            raise
        finally:
            facts = state["call"].facts() if "call" in state else {}
            if "refused" in state:
                status, facts["error"] = state["refused"]
            elif gone and status is not None and status < 400:
                facts["error"] = facts.get("error") or str(GONE)
            if scope["path"] not in PROBES:
                final = status or (GONE if gone else 500)
                self._record(scope, final, facts, clock, time.perf_counter() - begin)

    def _record(
        self, scope: Scope, status: int, facts: dict[str, Any], clock: int, seconds: float
    ) -> None:
        """Count, trace and log a call that has ended."""
        state, broken = scope["state"], facts.get("error")  # of a stream that began with 200
        if status >= 400:
            self.failed(status)
        elif broken is not None:
            self.failed(int(broken) if str(broken).isdecimal() else 500)
        if self.tracer is not None and scope["method"] == "POST" and state.get("trusted"):
            route = getattr(scope.get("route"), "path", None)
            self.tracer.record(route, Headers(scope=scope), clock, status, facts)
        if scope["method"] == "POST" or status >= 400:
            log_call(
                {
                    "request_id": state["request_id"], "method": scope["method"],
                    "path": scope["path"], "status": status, "seconds": seconds, **facts,
                }
            )  # fmt: skip
