"""``/v1/chat/completions``."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import Request as HttpRequest

from ..base.types import SAMPLE, Event, grouped_by
from ..frontend.outputs import RequestState, SampleState
from ..text.called import new_id
from ..text.messages import readable
from .answer import chat_logprobs, nulls, prompt_logprobs, step_of, stop_of
from .dialogue import CallNews, Dialogue, Seen
from .protocol import ChatRequest
from .reader import Said
from .service import Service
from .tools import reason_of

THOUGHTLESS = {"reasoning_content": None}
"""The field of thoughts that SGLang's clients expect in every delta."""


class Chat(Dialogue):
    """A chat call, whose answer has a choice for each sample."""

    prefix = "chatcmpl"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, http: HttpRequest) -> None:
        super().__init__(service, body, http)
        self.seen = [Seen() for _ in range(body.n)]
        self.echoed = ""  # the beginning of the content that the client has given

    async def prepare(self) -> None:
        last = self.body.messages[-1]
        await super().prepare()
        if self.body.echo and last["role"] == "assistant":
            self.echoed = readable([last])[0]["content"]

    def build(self) -> dict[str, Any]:
        (state,) = self.states
        choices = []
        for i, sample in enumerate(state.samples):
            said = self.read(sample)
            shown: str | None = self.echoed + said.content
            if said.calls and not self.choice.how.startswith("="):
                shown = shown or None  # with a named tool vLLM sends an empty text
            message: dict[str, Any] = {"role": "assistant", "content": shown}
            message |= nulls("message")
            message |= self._thoughts(said.thoughts)
            if said.calls:
                message["tool_calls"] = [call.as_json(new_id()) for call in said.calls]
            reason = reason_of(sample.finish_reason, said.calls, self.choice.how)
            begun = {"index": i, "message": message, **nulls("chat choice")}
            choices.append(self._choice(begun, sample, 0, reason))
        answer: dict[str, Any] = {
            **self.head("chat.completion"), **nulls("answer", "chat"), "choices": choices,
            "usage": self.usage(), **self.figures(),
        }  # fmt: skip
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(state.request.prompt_token_ids)
        return answer

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        (state,) = self.states
        (run,) = self.runs()
        begun = False
        async for events in run:
            if not begun:
                begun = True
                for role in self._roles(state):
                    yield role
            for i, new in grouped_by(events, SAMPLE).items():
                choice = self._delta(i, state, new)
                emitted = sum(event.token_id is not None for event in new)
                if choice is None:
                    self.emitted += emitted  # sent with the next chunk
                else:
                    yield self.chunk(choice, emitted)

    def _roles(self, state: RequestState) -> Iterator[dict[str, Any]]:
        """Yield the first chunk of every choice: its role, and no tokens yet."""
        ids = state.request.prompt_token_ids
        more = {"prompt_token_ids": list(ids)} if self.body.return_token_ids else {}
        for i in range(self.body.n):
            first = {
                "index": i, "delta": {"role": "assistant", "content": self.echoed, **THOUGHTLESS},
                "logprobs": None, "finish_reason": None, **stop_of(SampleState()),
            }  # fmt: skip
            yield self.chunk(first, 0) | more
            more = {}

    def _delta(self, i: int, state: RequestState, events: list[Event]) -> dict[str, Any] | None:
        """Return what one step adds to sample ``i``; None if nothing can be shown yet."""
        sample, reason = state.samples[i], events[-1].finish_reason
        start = len(sample.token_ids) - sum(e.token_id is not None for e in events)
        said = self.read(sample, reason is not None)
        news = self.seen[i].news(said)
        delta = self._thoughts(news.thoughts)
        if news.content:
            delta["content"] = news.content
        if news.calls:
            delta["tool_calls"] = [_call_delta(each) for each in news.calls]
        body = self.body
        if not (
            delta or reason or body.logprobs or body.return_token_ids or body.return_speculation
        ):
            return None
        choice: dict[str, Any] = {"index": i, "delta": {**THOUGHTLESS, **delta}}
        if body.return_speculation:
            choice["speculation"] = step_of(events, self.service.llm.inputs.outputs.decode)
        return self._choice(choice, sample, start, reason_of(reason, said.calls, self.choice.how))

    def read(self, sample: SampleState, whole: bool = True) -> Said:
        said, body = super().read(sample, whole), self.body
        if not body.separate_reasoning:
            begins = said.answer_begins
            answer = sample.text[begins:]
            space = answer[: len(answer) - len(answer.lstrip())] if begins else ""
            content = sample.text[:begins] + space + said.content
            return said._replace(thoughts="", content=content)
        begun = whole or said.content or said.calls
        return said if body.stream_reasoning or begun else said._replace(thoughts="")

    def usage(self, output: int | None = None) -> dict[str, Any]:
        """See ``ApiCall.usage``; SGLang's clients find the tokens of thoughts at the top."""
        used = super().usage(output)
        details = used["completion_tokens_details"]
        return used | {"reasoning_tokens": details.get("reasoning_tokens", 0)}

    def _thoughts(self, text: str) -> dict[str, Any]:
        """Return the fields of thoughts, by the names of vLLM and of DeepSeek's clients."""
        if not text or not self.body.include_reasoning:
            return {}
        return {"reasoning": text, "reasoning_content": text}

    def _choice(
        self, choice: dict[str, Any], sample: SampleState, start: int, reason: str | None
    ) -> dict[str, Any]:
        """Return a choice with the figures of the sample's tokens from ``start`` on."""
        logprobs, ids = sample.logprobs[start:], sample.token_ids[start:]
        top, outputs = self.body.top_logprobs or 0, self.service.llm.inputs.outputs
        listed = None
        if self.body.logprobs:
            by_id = self.body.return_tokens_as_token_ids
            listed = chat_logprobs(logprobs, ids, top, outputs, by_id)
        choice |= {
            "logprobs": listed, "finish_reason": reason, **stop_of(sample),
        }  # fmt: skip
        if self.body.return_token_ids:
            choice["token_ids"] = ids
        return choice


def _call_delta(news: CallNews) -> dict[str, Any]:
    """Return the delta of a call: all of it, or more of its arguments."""
    if news.first:
        return {"index": news.number, **news.call.as_json(news.id)}
    return {"index": news.number, "function": {"arguments": news.arguments}}
