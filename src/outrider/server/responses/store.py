"""Responses that the server keeps in memory, within bounds, so that calls can continue them."""

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import shown
from ..errors import Refusal

MOST_BYTES = 64 << 20
"""Most bytes of JSON of all stored responses."""


@dataclass
class Kept:
    """A response: its messages without instructions, and its JSON.

    ``cancel`` ends it, and can also delete it, while it runs; None once it has ended.
    """

    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    cancel: Callable[..., None] | None = None
    size: int = 0


class Store:
    """Up to ``most`` responses for each key; the least recently used go first. 0 keeps none.

    Each of ``owners`` has an equal share of ``MOST_BYTES``. Running responses always stay, so that
    they can be cancelled; the server bounds how many run.
    """

    def __init__(self, most: int, owners: int) -> None:
        self.most, self._share = most, MOST_BYTES // max(1, owners)
        self._kept: defaultdict[int | None, OrderedDict[str, Kept]] = defaultdict(OrderedDict)
        self._bytes: defaultdict[int | None, int] = defaultdict(int)

    def put(self, id: str, owner: int | None, kept: Kept) -> None:
        """Store a response, or its new state."""
        self.drop(id, owner)
        own = self._kept[owner]
        kept.size = len(json.dumps([kept.messages, kept.answer]))
        own[id] = kept
        self._bytes[owner] += kept.size
        while own and (len(own) > self.most or self._bytes[owner] > self._share):
            oldest = next((id for id, each in own.items() if each.cancel is None), None)
            if oldest is None:
                break
            self.drop(oldest, owner)

    def drop(self, id: str, owner: int | None) -> None:
        """Forget a response."""
        kept = self._kept[owner].pop(id, None)
        self._bytes[owner] -= 0 if kept is None else kept.size

    def get(self, id: str, owner: int | None, param: str | None = None) -> Kept:
        """Return a response of an owner. Raises Refusal: 404, it is not stored."""
        own = self._kept[owner]
        kept = own.get(id)
        if kept is None:
            why = "" if self.most else "; start the server with --store-responses to keep them"
            raise Refusal(f"Response with id {shown(id)} not found{why}.", param, status=404)
        own.move_to_end(id)
        return kept
