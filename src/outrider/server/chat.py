"""``/v1/chat/completions``."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import Request as HttpRequest

from ..base.types import SAMPLE, Event, grouped_by
from ..frontend.outputs import RequestState, SampleState
from .answer import chat_logprobs, nulls, prompt_logprobs, step_of
from .api_call import ApiCall
from .errors import Refusal
from .protocol import ChatRequest
from .record import of_messages
from .service import Service
from .tools import MARKS, ToolCall, choice_of, constraint, read, reason_of


class Chat(ApiCall[ChatRequest]):
    """A chat call: its messages, and the form of the answer."""

    prefix = "chatcmpl"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, http: HttpRequest) -> None:
        super().__init__(service, body, http)
        self.choice = choice_of(body)
        self.sent = [0] * body.n  # characters of each sample that were shown
        self.shown_calls: list[list[ToolCall]] = [[] for _ in range(body.n)]

    async def prepare(self) -> None:
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise Refusal("top_logprobs needs logprobs: true.", "top_logprobs")
        listed = (body.top_logprobs or 0) if body.logprobs else None
        form = self._constraint()
        self.lease = self.service.admit(body.n)
        await self.read_options(1, logprobs=listed, **form)
        tools = (body.tools or []) if self.choice != "none" else []
        whole = await self.service.texts.chat_ids(body.messages, tools, body, self.long)
        ids = self.truncated(whole)
        if self.recorder is not None:
            self.asked = [of_messages(body.messages) if ids is whole else None]
        body.messages = []  # they may be long, and are not needed any more
        self.states = [self.start(ids)]
        self.lease.add_tokens(len(ids))

    def build(self) -> dict[str, Any]:
        (state,) = self.states
        choices = []
        for i, sample in enumerate(state.samples):
            content, calls = self._read(sample, True)
            shown = content or None if calls else content
            message: dict[str, Any] = {"role": "assistant", "content": shown, **nulls("message")}
            if calls:
                message["tool_calls"] = [call.as_json() for call in calls]
            reason = reason_of(sample.finish_reason, calls, self.choice)
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
                "index": i, "delta": {"role": "assistant", "content": ""},
                "logprobs": None, "finish_reason": None, "stop_reason": None,
            }  # fmt: skip
            yield self.chunk(first, 0) | more
            more = {}

    def _delta(self, i: int, state: RequestState, events: list[Event]) -> dict[str, Any] | None:
        """Return what one step adds to sample ``i``; None if nothing can be shown yet."""
        sample, reason = state.samples[i], events[-1].finish_reason
        start = len(sample.token_ids) - sum(e.token_id is not None for e in events)
        content, calls = self._read(sample, reason is not None)
        new = content[self.sent[i] :]
        self.sent[i] += len(new)
        delta: dict[str, Any] = {"content": new} if new else {}
        news = self._news(self.shown_calls[i], calls)
        if news:
            delta["tool_calls"] = news
        body = self.body
        if not (
            delta or reason or body.logprobs or body.return_token_ids or body.return_speculation
        ):
            return None
        choice: dict[str, Any] = {"index": i, "delta": delta}
        if body.return_speculation:
            choice["speculation"] = step_of(events, self.service.llm.inputs.outputs.decode)
        return self._choice(choice, sample, start, reason_of(reason, calls, self.choice))

    def _constraint(self) -> dict[str, Any]:
        """Return the form that calls of tools must have, where nothing else gives one.

        Raises Refusal: a call must be made, and something else gives the output a form.
        """
        body, inputs = self.body, self.service.llm.inputs
        special = inputs.outputs.special_tokens
        marks = MARKS[self.service.settings.tool_form]
        ends = inputs.eos_token_ids
        others = sorted(
            id
            for token, id in special.items()
            if token not in marks and id not in ends and id < inputs.vocab_size
        )
        form = constraint(body, self.choice, self.service.settings.tool_form, special, others)
        if form is None:
            return {}
        has_another = body.form() is not None
        if self.choice == "auto" and (has_another or body.ignore_eos):
            return {}
        if has_another:
            raise Refusal("tool_choice and a form of the output exclude each other.", "tool_choice")
        # If the marks of calls are special tokens, they must be shown.
        shown = {"skip_special_tokens": False} if marks & special.keys() else {}
        return {"structured_outputs": form, **shown}

    def said(self, sample: SampleState) -> str:
        content, calls = self._read(sample, True)
        return "" if calls else content

    def _read(self, sample: SampleState, whole: bool) -> tuple[str, list[ToolCall]]:
        return read(sample.text, self.choice, self.service.settings.tool_form, whole)

    @staticmethod
    def _news(shown: list[ToolCall], calls: list[ToolCall]) -> list[dict[str, Any]]:
        """Return the deltas for the client: whole calls, or more of a call's arguments."""
        news = []
        for n, call in enumerate(calls):
            if n == len(shown):
                shown.append(call)
                news.append({"index": n, **call.as_json()})
            elif len(call.arguments) > len(shown[n].arguments):
                more = call.arguments[len(shown[n].arguments) :]
                shown[n] = call
                news.append({"index": n, "function": {"arguments": more}})
        return news

    def _choice(
        self, choice: dict[str, Any], sample: SampleState, start: int, reason: str | None
    ) -> dict[str, Any]:
        """Return a choice with the figures of the sample's tokens from ``start`` on."""
        logprobs, ids = sample.logprobs[start:], sample.token_ids[start:]
        top, outputs = self.body.top_logprobs or 0, self.service.llm.inputs.outputs
        choice |= {
            "logprobs": chat_logprobs(logprobs, ids, top, outputs) if self.body.logprobs else None,
            "finish_reason": reason, "stop_reason": sample.stop_reason,
        }  # fmt: skip
        if self.body.return_token_ids:
            choice["token_ids"] = ids
        return choice
