"""``/v1/chat/completions/batch``: several chats with the same options in one call."""

from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field
from pydantic_core import to_json

from ..errors import RequestError
from .answering import leaving, unless_gone
from .api_call import merged
from .chat import Chat
from .errors import Refusal
from .protocol import ChatRequest
from .service import Service
from .shapes import MOST_PROMPTS, Messages


class BatchRequest(ChatRequest):
    """The body of ``POST /v1/chat/completions/batch``: that of a chat, with conversations."""

    messages: Annotated[  # type: ignore[assignment]
        list[Messages], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)
    ]


class Batch:
    """A call with a chat for each conversation; its answer has a choice for each."""

    def __init__(self, service: Service, body: BatchRequest, http: HttpRequest) -> None:
        if body.stream:
            raise Refusal("a batch cannot be streamed; leave out stream.", "stream")
        if body.n != 1:
            raise Refusal(f"n is {body.n}; a batch has one answer per conversation.", "n")
        self.service, self.http = service, http
        chats = [body.model_copy(update={"messages": each}) for each in body.messages]
        self.calls = [Chat(service, chat, http) for chat in chats]

    async def answered(self) -> Response:
        """Return the answer; if one chat cannot be served, the whole call fails."""
        self.http.state.call = self
        with ExitStack() as stack:
            for call in self.calls:
                stack.enter_context(leaving(call))
            await unless_gone(self.http, self._prepare())
            self.http.state.held.close()
            await unless_gone(self.http, self._run())
        text = await self.service.texts.slow(lambda: to_json(self._build()))
        for call in self.calls:
            call.record()
        return Response(text, media_type="application/json")

    async def _prepare(self) -> None:
        listed = 0
        for number, call in enumerate(self.calls):
            call.listed, call.repeated = listed, len(self.calls)
            try:
                await call.prepare()
            except RequestError as error:
                error.args = (f"conversation {number}: {error}",)
                raise
            listed = call.listed

    async def _run(self) -> None:
        async for _ in merged([run for call in self.calls for run in call.runs()]):
            pass

    def _build(self) -> dict[str, Any]:
        answers = [call.build() for call in self.calls]
        choices = [{**answer["choices"][0], "index": i} for i, answer in enumerate(answers)]
        first, *others = (answer["usage"] for answer in answers)
        for other in others:
            first = _sum(first, other)
        return {**answers[0], "choices": choices, "usage": first}

    def facts(self) -> dict[str, Any]:
        """See ``ApiCall.facts``."""
        first, *others = (call.facts() for call in self.calls)
        for other in others:
            for name in ("prompt_tokens", "completion_tokens", "drafted", "accepted"):
                first[name] += other[name]
        return first


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two usages."""
    if isinstance(one, dict):
        return {name: _sum(value, other[name]) for name, value in one.items()}
    return one + other
