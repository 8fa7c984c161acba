"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request

from ..types import Event, by_sample
from .answer import (
    Answer,
    Sample,
    chat_logprobs,
    prompt_logprobs,
    step_of,
    usage,
)  # fmt: skip
from .generate import Service
from .protocol import ChatRequest, Refusal
from .tools import Call, choice_of, constraint, may_call, read_calls
from .work import Work

CHUNK = "chat.completion.chunk"


class Chat(Work[ChatRequest]):
    """One call: its messages, and how the answers are shown."""

    prefix = "chatcmpl"

    def __init__(self, service: Service, body: ChatRequest, call: Request) -> None:
        super().__init__(service, body, call)
        self.choice = choice_of(body)
        self.sent = [0] * body.n  # characters of each sample that were shown
        self.begun = [False] * body.n

    async def prepare(self) -> None:
        """Make a request of the messages.

        Raises:
            OutriderError: it cannot be served.
        """
        body = self.body
        more: dict[str, Any] = {}
        if body.logprobs:
            more["logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs is not None:
            raise Refusal("top_logprobs needs logprobs: true.", "top_logprobs")
        schema = constraint(body, self.choice)
        if schema is not None:
            if body.form() is not None:
                raise Refusal(
                    "tool_choice and a form of the output exclude each other.", "tool_choice"
                )
            more["structured_outputs"] = {"json": schema}
        tools = [t.model_dump(exclude_none=True) for t in body.tools or []]
        ids = await self.service.chat_ids(
            body.messages, tools if self.choice != "none" else [], body.add_generation_prompt,
            body.chat_template_kwargs,
        )  # fmt: skip
        request = await self.service.request(body, ids, self.salt, **more)
        self.answers = [Answer(request, None)]
        self.service.admit([request])

    async def whole(self) -> dict[str, Any]:
        """Run it and show everything at once."""
        (answer,) = self.answers
        await self.service.finish(answer, self.body.timeout)
        choices = []
        for i, sample in enumerate(answer.samples):
            content, calls = self._read(sample.text)
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message["tool_calls"] = [call.as_json() for call in calls]
            choice = {
                "index": i, "message": message, "logprobs": self._logprobs(sample, 0),
                "finish_reason": self._reason(sample.finish_reason, calls),
            }  # fmt: skip
            choices.append(self._extras(choice, answer, sample, 0))
        found: dict[str, Any] = {
            **self.head("chat.completion"), "choices": choices, "usage": usage(self.answers),
            **self.figures(),
        }  # fmt: skip
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
        return found

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The same step by step; the last chunk has figures, and usage where asked."""
        (answer,) = self.answers
        head = self.head(CHUNK)
        async for events in self.service.run(answer, self.body.timeout):
            for i, new in by_sample(events).items():
                if not self.begun[i]:
                    self.begun[i] = True
                    first = {"role": "assistant", "content": ""}
                    yield {**head, "choices": [self._bare(i, first)]}
                for choice in self._deltas(i, answer, new):
                    yield {**head, "choices": [choice]}
        yield self.last_chunk(CHUNK)

    def _deltas(self, i: int, answer: Answer, events: list[Event]) -> list[dict[str, Any]]:
        """What one step brings to sample ``i``."""
        sample, reason = answer.samples[i], events[-1].finish_reason
        start = len(sample.ids) - sum(e.token_id is not None for e in events)
        calls: list[Call] = []
        fresh = ""
        if reason is not None:
            content, calls = self._read(sample.text)
            fresh = (content or "")[self.sent[i] :]
        elif not self._holds(sample.text):
            fresh = sample.text[self.sent[i] :]
        self.sent[i] += len(fresh)
        delta: dict[str, Any] = {"content": fresh} if fresh else {}
        if calls:
            delta["tool_calls"] = [call.as_json(n) for n, call in enumerate(calls)]
        found = self._bare(i, delta)
        found["logprobs"] = self._logprobs(sample, start)
        found["finish_reason"] = self._reason(reason, calls)
        if self.body.return_speculation:
            found["speculation"] = step_of(events, self.service.llm.intake.decode)
        shown = self.body.logprobs or self.body.return_token_ids or self.body.return_speculation
        if not (delta or reason or shown):
            return []
        return [self._extras(found, answer, sample, start)]

    def _holds(self, text: str) -> bool:
        """Whether text must wait because it may be a call."""
        if self.choice == "none":
            return False
        return self.choice != "auto" or may_call(text, self.service.settings.tool_form)

    def _read(self, text: str) -> tuple[str | None, list[Call]]:
        return read_calls(text, self.choice, self.service.settings.tool_form, self.body.tools or [])

    def _reason(self, reason: str | None, calls: list[Call]) -> str | None:
        called = calls and reason == "stop" and not self.choice.startswith("=")
        return "tool_calls" if called else reason

    def _logprobs(self, sample: Sample, start: int) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        top = self.body.top_logprobs or 0
        return chat_logprobs(sample.logprobs[start:], sample.ids[start:], top)

    def _bare(self, i: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}

    def _extras(
        self, choice: dict[str, Any], answer: Answer, sample: Sample, start: int
    ) -> dict[str, Any]:
        if self.body.return_token_ids:
            choice["token_ids"] = sample.ids[start:]
            if start == 0:
                choice["prompt_token_ids"] = list(answer.request.prompt_token_ids)
        return choice
