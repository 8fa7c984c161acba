"""Asks a server with OpenAI's API: its metrics, its model, and a few greedy answers."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ..errors import ConfigError, EndpointError

SECONDS = 30.0
MOST_BYTES = 1 << 25
PROMPTS = (
    "The quick brown fox", "def fibonacci(n):", "Once upon a time", "1, 2, 3, 4,",
    '{"name": "Alice", "age":', "The capital of France is", "SELECT name FROM", "Dear Sir or Madam",
)  # fmt: skip
TOKENS = 32


class Endpoint:
    """A server, by its address with or without ``/v1``.

    Args:
        key: sent as a bearer token; None sends none.

    Raises:
        ConfigError: the address or the key is none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, _ = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError(f"endpoint {url!r} is no address; give one like http://host:8000.")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key has letters that no header can carry; correct it.")
        self.host = host
        base = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{base}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        """Return status and body of an answer: POST of JSON, GET where there is no body.

        Raises:
            EndpointError: nobody answers, or the answer is not HTTP.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        request = Request(self.url + path, data, headers)
        try:
            with urlopen(request, timeout=SECONDS) as answer:
                return answer.status, answer.read(MOST_BYTES)
        except HTTPError as error:
            with error:
                return error.code, b""
        except (URLError, OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise EndpointError(
                f"{self.url} cannot be reached ({why}); start the server or correct the address."
            ) from None

    def model(self) -> str:
        """Return the name of the first model.

        Raises:
            EndpointError: the server is down, refuses the key, or does not speak OpenAI's API.
        """
        status, body = self.ask("/v1/models")
        if status in (401, 403):
            raise EndpointError(f"{self.url} wants an API key (HTTP {status}); give --api-key.")
        try:
            if status != 200:
                raise ValueError(f"HTTP {status}")
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            why = str(error) if str(error).startswith("HTTP") else "its answer lists no model"
            raise EndpointError(
                f"{self.url}/v1/models is not OpenAI's ({why}); correct the address."
            ) from None

    def metrics(self) -> str | None:
        """Return the text of ``/metrics``; None where the server has none."""
        status, body = self.ask("/metrics")
        return body.decode("utf-8", "replace") if status == 200 else None

    def answers(self) -> list[str]:
        """Return the greedy answers to a few short prompts.

        Raises:
            EndpointError: the server does not complete texts.
        """
        model, found = self.model(), []
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            status, answer = self.ask("/v1/completions", body)
            try:
                if status != 200:
                    raise ValueError(f"HTTP {status}")
                found.append(str(json.loads(answer)["choices"][0]["text"]))
            except (ValueError, LookupError, TypeError):
                raise EndpointError(
                    f"{self.url}/v1/completions answers no prompt (HTTP {status}); outputs cannot "
                    "be compared there."
                ) from None
        return found


def differing(one: Endpoint, other: Endpoint) -> float:
    """Return the share of a few greedy answers in which two servers differ."""
    pairs = list(zip(one.answers(), other.answers(), strict=True))
    return sum(mine != theirs for mine, theirs in pairs) / len(pairs)
