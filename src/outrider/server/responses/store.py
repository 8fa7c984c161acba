"""Responses that the server keeps, so that calls may go on behind them: bounded, in memory."""

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import shown
from ..errors import Refusal

MOST_BYTES = 64 << 20
"""Bytes of JSON of all that is kept."""


@dataclass
class Kept:
    """A response: whose it is, its messages without instructions, and its JSON.

    ``cancel`` ends it while it runs, None then.
    """

    owner: int | None
    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    cancel: Callable[[], None] | None = None
    size: int = 0


class Store:
    """Up to ``most`` responses, of which those used least recently go first; 0 keeps none."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0

    def put(self, id: str, kept: Kept) -> None:
        """Keep a response, or what has become of it."""
        self.drop(id)
        kept.size = len(json.dumps([kept.messages, kept.answer]))
        self._kept[id] = kept
        self._bytes += kept.size
        while self._kept and (len(self._kept) > self.most or self._bytes > MOST_BYTES):
            self.drop(next(iter(self._kept)))

    def drop(self, id: str) -> None:
        """Forget a response."""
        kept = self._kept.pop(id, None)
        self._bytes -= 0 if kept is None else kept.size

    def get(self, id: str, owner: int | None, param: str | None = None) -> Kept:
        """Return a response of an owner. Raises Refusal: 404, it is not kept."""
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            why = "" if self.most else "; start the server with --store-responses to keep them"
            raise Refusal(f"there is no response {shown(id)} here{why}.", param, status=404)
        self._kept.move_to_end(id)
        return kept
