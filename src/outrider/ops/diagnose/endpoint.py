"""Asks a server with OpenAI's API: its metrics, its model, and a few greedy answers."""

from __future__ import annotations

from typing import Any

from ...base.outside.documents import MIB
from ...base.outside.http import Answer, address, call, check_key
from ...errors import EndpointError
from ..metrics import Page, ask_page

ANSWER_SECONDS = 30.0
LARGEST_ANSWER = 4 * MIB
PROMPTS = (
    "The quick brown fox", "def fibonacci(n):", "Once upon a time", "1, 2, 3, 4,",
    '{"name": "Alice", "age":', "The capital of France is", "SELECT name FROM", "Dear Sir or Madam",
)  # fmt: skip
TOKENS = 32


class Endpoint:
    """A server by its address, with or without ``/v1``; the key is sent to this server only."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = address(url)
        check_key(key)
        self.host = parts.host
        self.url = parts.place + parts.path.removesuffix("/metrics").removesuffix("/v1")
        self._key = key

    def ask(self, path: str, body: Any = None) -> Answer:
        """Return the answer to a request: POST with a JSON body, GET without a body."""
        return call(
            self.url + path, body, key=self._key, seconds=ANSWER_SECONDS, limit=LARGEST_ANSWER
        )

    def model(self) -> str:
        """Return the name of the first model."""
        answer = self.ask("/v1/models")
        if answer.status in (401, 403):
            raise EndpointError(
                f"{self.url} wants an API key (HTTP {answer.status}); give --api-key."
            )
        if answer.status != 200:
            why = f"HTTP {answer.status}"
        else:
            try:
                return str(answer.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                why = "its answer lists no model"
        raise EndpointError(f"{self.url}/v1/models is not OpenAI's ({why}); correct the address.")

    def metrics(self) -> Page | None:
        """Return the page of ``/metrics``; None if the server has none."""
        return ask_page(self.url, self._key, ANSWER_SECONDS)

    def answers(self) -> list[str]:
        """Return the greedy answers to a few short prompts."""
        model, texts = self.model(), []
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
            answer = self.ask("/v1/completions", body)
            try:
                if answer.status != 200:
                    raise ValueError(f"HTTP {answer.status}")
                texts.append(str(answer.json()["choices"][0]["text"]))
            except (ValueError, LookupError, TypeError):
                raise EndpointError(
                    f"{self.url}/v1/completions completes no prompt (HTTP {answer.status}); its "
                    "outputs cannot be compared."
                ) from None
        return texts


def differing(one: Endpoint, other: Endpoint) -> float:
    """Return the share of a few prompts to which two servers give different greedy answers."""
    pairs = list(zip(one.answers(), other.answers(), strict=True))
    return sum(mine != theirs for mine, theirs in pairs) / len(pairs)
