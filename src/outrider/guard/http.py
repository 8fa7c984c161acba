"""One HTTP call with a deadline, no proxies and no redirects; answers are bounded."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import EndpointError

MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class Answer:
    """A status and a body."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Return whether it is a success."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Return the body's value; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


def call(
    url: str, body: Any = None, *, method: str | None = None, key: str | None = None,
    headers: Mapping[str, str] | None = None, seconds: float = 5.0,
    tls: ssl.SSLContext | None = None,
) -> Answer:  # fmt: skip
    """Return the answer to a request: POST of JSON, GET where there is no body.

    It ends after ``seconds`` without a byte, and soon after as many in all.

    Raises:
        EndpointError: nobody answers, or it is not HTTP.
    """
    parts = urlsplit(url)
    data = None if body is None else json.dumps(body).encode()
    sent = {"Accept": "application/json", **(headers or {})}
    if data is not None:
        sent.setdefault("Content-Type", "application/json")
    if key:
        sent["Authorization"] = f"Bearer {key}"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.netloc.rpartition("@")[2], timeout=seconds, context=tls
        )
    else:
        connection = http.client.HTTPConnection(parts.netloc.rpartition("@")[2], timeout=seconds)
    end = time.monotonic() + seconds
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, sent)
        answer, read = connection.getresponse(), b""
        while len(read) < MOST_BYTES and (more := answer.read1(MOST_BYTES - len(read))):
            read += more
            if time.monotonic() > end:
                raise TimeoutError("it takes too long")
        return Answer(answer.status, read)
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        host = f"{parts.scheme}://{parts.hostname}:{parts.port}" if parts.port else parts.netloc
        raise EndpointError(f"{host} does not answer ({why}).") from None
    finally:
        connection.close()
