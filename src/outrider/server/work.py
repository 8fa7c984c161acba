"""What completions and chats have in common: who asked, and what surrounds the choices."""

from __future__ import annotations

import time
import uuid
from typing import Any, Generic, TypeVar

from ..types import Event
from .answer import Answer, metrics, seed_of, usage
from .generate import Service
from .protocol import Generation

Body = TypeVar("Body", bound=Generation)


class Work(Generic[Body]):
    """One call: its body, and an answer a prompt; ``salt`` keeps its cached prefix from others."""

    prefix: str
    """What its id begins with."""

    def __init__(self, service: Service, body: Body, salt: str) -> None:
        self.service = service
        self.body = body
        self.salt = salt
        self.id = f"{self.prefix}-{body.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self.answers: list[Answer] = []

    def head(self, kind: str) -> dict[str, Any]:
        """How every answer and every chunk of ``kind`` begins."""
        return {
            "id": self.id, "object": kind, "created": self.created,
            "model": self.body.model or self.service.name,
            "system_fingerprint": self.service.settings.fingerprint,
        }  # fmt: skip

    def figures(self) -> dict[str, Any]:
        """The seed that was used, and what speculation did."""
        settings = self.service.settings
        return {
            "seed": seed_of(self.answers[0].request),
            "metrics": metrics(self.answers, settings.longest, settings.detail),
        }

    def last_chunk(self, kind: str) -> dict[str, Any]:
        """The end of a stream: figures, and usage where it was asked for."""
        asked = self.body.stream_options
        used = usage(self.answers) if asked and asked.include_usage else None
        return {**self.head(kind), "choices": [], **self.figures(), "usage": used}


def by_sample(events: list[Event]) -> dict[int, list[Event]]:
    """The events of one step by sample."""
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.sample_index, []).append(event)
    return found
