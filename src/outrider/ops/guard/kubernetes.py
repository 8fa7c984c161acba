"""Kubernetes' API over plain HTTP, with the pod's own account; no client library is needed."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

from ...base.outside.http import SECONDS, Answer, call
from ...base.outside.text import printable
from ...errors import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MISSING = 404
CONFLICT = 409
INVALID = 422


class Cluster:
    """One API server, by the address that ``kubectl proxy`` prints, or the pod's own cluster.

    ``key_env`` is a variable with a token; without it the account's token is used. Raises
    ConfigError: no address is given, and this is no pod.
    """

    def __init__(self, url: str | None, key_env: str | None = None) -> None:
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{x}") for x in ("HOST", "PORT"))
        if url is None and not (host and port):
            raise ConfigError("This is no pod: name the API server's url (try kubectl proxy).")
        own = f"[{host}]" if host and ":" in host else host
        self.url = (url or f"https://{own}:{port}").rstrip("/")
        self._key_env = key_env
        self._tls: ssl.SSLContext | None = None
        if self.url.startswith("https:"):
            authority = ACCOUNT / "ca.crt"
            try:
                file = str(authority) if authority.exists() else None
                self._tls = ssl.create_default_context(cafile=file)
            except OSError as error:
                why = printable(error.strerror or error)
                raise ConfigError(f"{authority} holds no certificates ({why}).") from None

    def ask(self, path: str, body: Any = None, *, method: str | None = None,
            kind: str = "application/json", seconds: float = SECONDS) -> Answer:  # fmt: skip
        """Return the answer to a request. Raises EndpointError: there is no answer."""
        return call(self.url + path, body, method=method, key=self._key(), seconds=seconds,
                    tls=self._tls,
                    headers={"Content-Type": kind} if body is not None else None)  # fmt: skip

    def _key(self) -> str | None:
        """Return the token; it is read each time, since the account's token is renewed."""
        if self._key_env:
            return os.environ.get(self._key_env)
        try:
            return (ACCOUNT / "token").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None


def reason(answer: Answer) -> str:
    """Return why the API server refuses."""
    document = answer.json()
    told = printable(document.get("message") or "") if isinstance(document, dict) else ""
    return f"HTTP {answer.status}{f': {told}' if told else ''}"
