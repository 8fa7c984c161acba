"""Requests that killed the engine: those that ran alone when it died."""

import hashlib
from collections.abc import Iterable, Set
from typing import Any

from ...base.types import Request
from ...errors import RequestError

DEATHS = 2  # one death may have another cause
REMEMBERED = 1024  # bodies in the table; each entry costs a death of the engine


def fingerprint(requests: Iterable[Request]) -> str:
    """Return a digest of a body's requests, without ids, priorities and the engine's seeds."""
    digest = hashlib.blake2b(digest_size=16)
    shared: Any = None  # requests of one body mostly have one object of options
    for request in requests:
        options = request.params, request.speculation
        if shared is None or any(a is not b for a, b in zip(options, shared, strict=True)):
            shared = options
            digest.update(repr(options).encode("utf-8", "surrogatepass"))
        digest.update(
            repr((request.prompt_token_ids, request.cache_salt)).encode("utf-8", "surrogatepass")
        )
    return digest.hexdigest()


class Suspects:
    """Counts for each body the engine's deaths while no other body ran."""

    def __init__(self) -> None:
        self._deaths: dict[str, int] = {}

    def __contains__(self, body: str) -> bool:
        return body in self._deaths

    def check(self, body: str) -> None:
        """Raise RequestError for a body that ran alone at two deaths and did not complete since."""
        if self._deaths.get(body, 0) >= DEATHS:
            raise RequestError(
                f"the engine died {DEATHS} times while this request ran alone, so the request is "
                "refused until the server restarts; change it, and report it."
            )

    def died(self, bodies: Set[str]) -> None:
        """Count a death of the engine while these bodies ran."""
        if len(bodies) != 1:
            return
        (body,) = bodies
        if body not in self._deaths and len(self._deaths) >= REMEMBERED:
            del self._deaths[next(iter(self._deaths))]
        self._deaths[body] = self._deaths.get(body, 0) + 1

    def completed(self, body: str) -> None:
        """Clear a body that ran to its end."""
        self._deaths.pop(body, None)
