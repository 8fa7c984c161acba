"""What completions and chats have in common: who asked, and what surrounds the choices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Generic, TypeVar

from fastapi import Request as Call

from ..engine.suspects import fingerprint
from ..errors import shown
from ..outputs import Pending
from ..types import Counts
from .admission import Lease
from .answer import metrics, seed_of, usage
from .bodies import LONG_BODY
from .generate import Service
from .protocol import Generation, Refusal

LONG_LIST = 1 << 9
"""Positions with log probabilities from which on an answer is made in a thread."""

Body = TypeVar("Body", bound=Generation)


class Work(ABC, Generic[Body]):
    """One call: its body, and an answer a prompt; ``error`` says what ended its stream."""

    prefix: str
    """What its id begins with."""

    def __init__(self, service: Service, body: Body, call: Call) -> None:
        if body.stream and body.prompt_logprobs is not None:
            raise Refusal(
                "prompt_logprobs are not sent in a stream; leave out stream.", "prompt_logprobs"
            )
        self.service = service
        self.body = body
        self.salt = service.salt(body.cache_salt, call)
        self.id = f"{self.prefix}-{body.request_id or call.state.request_id}"
        self.error: str | None = None
        self.created = int(time.time())
        self.answers: list[Pending] = []
        self.shown_to_end = 0  # choices of a stream
        self.long: bool = call.state.body_bytes >= LONG_BODY
        self.lease = Lease(service.queue, 0)

    @property
    def lists_much(self) -> bool:
        """True when the whole answer takes long to make, for what it lists beside its text."""
        listed = sum(len(s.logprobs) for a in self.answers for s in a.samples)
        return listed + sum(len(a.prompt_logprobs or ()) for a in self.answers) > LONG_LIST

    async def built(self) -> dict[str, Any]:
        """The whole answer, made in a thread where that takes long."""
        return await self.service.slow(self.build) if self.lists_much else self.build()

    @abstractmethod
    def build(self) -> dict[str, Any]:
        """The whole answer, once everything has run."""

    def truncated(self, ids: list[int]) -> list[int]:
        """Return the end of a prompt, or its beginning, as ``truncate_prompt_tokens`` asks.

        Raises:
            Refusal: the number is out of its range.
        """
        most, context = self.body.truncate_prompt_tokens, self.service.llm.intake.max_model_len
        if most is None:
            return ids
        if most == 0 or not -1 <= most <= context:
            raise Refusal(
                f"truncate_prompt_tokens is {shown(most)}; give 1 to {context}, or -1 for "
                "all that the context holds.", "truncate_prompt_tokens",
            )  # fmt: skip
        if most == -1:
            most = max(1, context - max(1, self.body.limit or 1))
        if len(ids) <= most:
            return ids
        return ids[-most:] if self.body.truncation_side == "left" else ids[:most]

    def sign(self) -> None:
        """Give the call's requests one name, by which a call that kills the engine is known.

        Raises:
            RequestError: this one killed it.
        """
        body = fingerprint(answer.request for answer in self.answers)
        self.service.llm.suspects.check(body)
        for answer in self.answers:
            answer.request = replace(answer.request, body=body)

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

    def usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` of the call."""
        return usage(self.answers)

    @property
    def usage_asked(self) -> bool:
        """Whether a stream ends with a chunk of usage; others have one choice each."""
        asked = self.body.stream_options
        return asked is not None and asked.include_usage

    def chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        """A part of a stream; what ends its last choice has figures."""
        found = {**self.head(kind), "choices": [choice]}
        asked = self.body.stream_options
        if asked is not None and asked.include_usage:
            found["usage"] = self.usage() if asked.continuous_usage_stats else None
        if not choice["finish_reason"]:
            return found
        self.shown_to_end += 1
        last = self.shown_to_end == sum(len(a.samples) for a in self.answers)
        return found | self.figures() if last else found

    def last_chunk(self, kind: str) -> dict[str, Any]:
        """The end of a stream whose usage was asked for."""
        return {**self.head(kind), "choices": [], **self.figures(), "usage": self.usage()}

    def facts(self) -> dict[str, Any]:
        """What log and traces tell of the call, None where it is not known."""
        body, samples = self.body, [s for a in self.answers for s in a.samples]
        drafts = [draft for s in samples for draft in s.drafts]
        counts = Counts(
            drafts=len(drafts),
            drafted=sum(draft.depth for draft in drafts),
            accepted=sum(sum(s.accepted) for s in samples),
        )
        firsts = [a.ttft for a in self.answers if a.ttft is not None]
        queued = [a.queued for a in self.answers if a.queued is not None]
        used = self.usage()
        return {
            "id": self.id, "model": body.model, "served_model": self.service.name,
            "prompt_tokens": used["prompt_tokens"], "completion_tokens": used["completion_tokens"],
            "finish_reasons": [s.finish_reason for s in samples if s.finish_reason] or None,
            "stream": body.stream, "n": body.n, "max_tokens": body.limit,
            "temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k,
            "frequency_penalty": body.frequency_penalty, "presence_penalty": body.presence_penalty,
            "queue_seconds": min(queued, default=None), "ttft_seconds": min(firsts, default=None),
            "drafted": counts.drafted, "accepted": counts.accepted,
            "acceptance_length": counts.acceptance_length, "error": self.error,
        }  # fmt: skip
