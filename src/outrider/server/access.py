"""The outer layer of every call: its id, log line, span, and the count of failures."""

import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .log import log_call
from .protocol import REQUEST_ID
from .traces import Tracer

HEADER = "x-request-id"
PROBES = frozenset({"/health", "/ready"})
"""Probes: not counted as calls or errors."""


class Access:
    """Gives every call an id, and logs those that change something or fail.

    An ``ApiCall`` stands in ``scope["state"]["call"]``; its ``facts`` go into the log and the span.

    Args:
        app: the next layer.
        failed: gets the status of every call that ends with an error.
        tracer: makes spans; None for none.
    """

    def __init__(
        self, app: ASGIApp, failed: Callable[[int], None], tracer: Tracer | None = None
    ) -> None:
        self.app = app
        self.failed = failed
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self.app(scope, receive, send)
            return
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        sent = headers.get(HEADER, "")
        id = state["request_id"] = sent if re.fullmatch(REQUEST_ID, sent) else uuid.uuid4().hex
        begin, status = time.perf_counter(), 500
        traced = self.tracer if scope["method"] == "POST" else None
        clock = time.time_ns()

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = id
            await send(message)

        try:
            await self.app(scope, receive, marked)
        finally:
            facts = state["call"].facts() if "call" in state else {}
            broken = facts.get("error")  # of a stream that had begun with 200
            if status >= 400:
                self.failed(status)
            elif broken is not None:
                self.failed(int(broken) if str(broken).isdecimal() else 500)
            if traced is not None and state.get("trusted"):
                traced.record(
                    getattr(scope.get("route"), "path", None), headers, clock, status, facts
                )
            if scope["method"] == "POST" or status >= 400:
                log_call(
                    {
                        "request_id": id, "method": scope["method"], "path": scope["path"],
                        "status": status, "seconds": time.perf_counter() - begin, **facts,
                    }
                )  # fmt: skip
