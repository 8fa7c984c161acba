"""HTTP/1.1 by uvicorn, and a limit on how long headers may take to come in, which it lacks."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def bounded(seconds: float) -> type[H11Protocol]:
    """A protocol that hangs up on whoever has not sent whole headers after so many seconds."""

    class Bounded(H11Protocol):
        late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.await_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self.in_time()
            else:  # the beginning of a next request
                self.await_headers()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.trailing_data[0] and self.conn.their_state is h11.IDLE:
                self.await_headers()  # what came along with the last request is a beginning

        def connection_lost(self, exc: Exception | None) -> None:
            self.in_time()
            super().connection_lost(exc)

        def await_headers(self) -> None:
            if self.late is None:
                self.late = self.loop.call_later(seconds, self.hang_up)

        def in_time(self) -> None:
            if self.late is not None:
                self.late.cancel()
                self.late = None

        def hang_up(self) -> None:
            self.late = None
            if not self.transport.is_closing():
                self.transport.close()

    return Bounded
