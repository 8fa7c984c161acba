"""``/v1/responses``: a chat as OpenAI's Responses API has it."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Request as HttpRequest

from ...errors import OutriderError
from ..answer import chat_logprobs
from ..blocks import Block, BlockCall, Change
from ..errors import Refusal, error_body
from ..service import Service
from .body import ResponsesRequest
from .store import Kept

INCOMPLETE = {"length": "max_output_tokens"}
"""Why a response is incomplete, by the sample's finish reason."""


class Responses(BlockCall):
    """A call of the Responses API; its answer is a list of items."""

    prefix = "resp"
    chunk_kind = "response"
    names: Mapping[str, str] = MappingProxyType({
        "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format", "reasoning_effort": "reasoning.effort",
    })  # fmt: skip

    def __init__(self, service: Service, asked: ResponsesRequest, http: HttpRequest) -> None:
        store = service.responses
        before: list[dict[str, Any]] = []
        if asked.previous_response_id is not None:
            id = asked.previous_response_id
            before = store.get(id, http.state.key, "previous_response_id").messages
        body = asked.chat(before)
        super().__init__(service, body, http)
        self.id = f"resp_{body.request_id or http.state.request_id}"
        self.asked_for = asked
        self.keeps = bool(store.most) and asked.store is not False
        self.owner = http.state.key
        own = body.messages[1:] if asked.instructions else body.messages
        self.messages = own if self.keeps else []
        self._number = 0
        self._ids: dict[int, str] = {}
        self._shown_logprobs = 0

    def build(self) -> dict[str, Any]:
        self.finish()
        return self._ended()

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream."""
        begun = False
        async for changes in self.changes():
            if not begun:
                begun = True
                response = self._object("in_progress", begins=True)
                self._keep(response)
                yield self._event("response.created", response=response)
                yield self._event("response.in_progress", response=response)
            for change in changes:
                for event in self._told(change):
                    yield event
        answer = self._ended()
        kind = "completed" if answer["status"] == "completed" else "incomplete"
        yield self._event(f"response.{kind}", response=answer)

    def failed(self, error: OutriderError) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream that fails on the way."""
        told = error_body(error)["error"]
        code = "invalid_prompt" if str(told["code"]).startswith("4") else "server_error"
        answer = self._object("failed") | {"error": {"code": code, "message": told["message"]}}
        self._keep(answer)
        yield self._event(
            "error", code=str(told["code"]), message=told["message"], param=told["param"]
        )
        yield self._event("response.failed", response=answer)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event, which has its number in the stream."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _ended(self) -> dict[str, Any]:
        """Return the response at its end, which is kept if it may be."""
        reason = self.sample.finish_reason
        status = "incomplete" if reason in INCOMPLETE else "completed"
        answer = self._object("cancelled" if self.cancelled else status)
        self._keep(answer)
        return answer

    def _keep(self, answer: dict[str, Any]) -> None:
        """Keep the response as it is now, where the server keeps any."""
        if not self.keeps:
            return
        runs = answer["status"] == "in_progress"
        messages = self.messages if runs else [*self.messages, *self._answered()]
        kept = Kept(self.owner, messages, answer, self.cancel if runs else None)
        self.service.responses.put(self.id, kept)

    def _answered(self) -> list[dict[str, Any]]:
        """Return the assistant's message, as the next call of the conversation has it."""
        said = self.read(self.sample)
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.thoughts:
            message["reasoning"] = said.thoughts
        if said.calls:
            message["tool_calls"] = [call.as_json() for call in said.calls]
        return [message]

    def cancel(self) -> None:
        """End the response at its next step."""
        self.cancelled = True

    def _object(self, status: str, begins: bool = False) -> dict[str, Any]:
        """Return the response as far as it has come; as it ``begins`` it has no items."""
        asked, body, settings = self.asked_for, self.body, self.service.settings
        reason = self.sample.finish_reason if status == "incomplete" else None
        usage = None if status == "in_progress" else self._usage()
        params = self.states[0].request.params
        form = asked.text.format if asked.text else None
        shape = (
            {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        )
        ended = None if status == "in_progress" else time.time()
        return {
            "id": self.id, "object": "response", "created_at": float(self.created),
            "completed_at": ended, "status": status, "background": False, "error": None,
            "incomplete_details": None if reason is None else {"reason": INCOMPLETE[reason]},
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None, "model": body.model or self.service.name,
            "output": [] if begins else [self._item(block, status) for block in self.shown],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "safety_identifier": asked.safety_identifier, "service_tier": "default",
            "store": self.keeps, "temperature": params.temperature,
            "text": {"format": shape, "verbosity": "medium"},
            "tool_choice": asked.tool_choice or ("auto" if asked.tools else "none"),
            "tools": asked.tools or [], "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": asked.truncation, "usage": usage, "user": asked.user,
            "metadata": asked.metadata or {}, "system_fingerprint": settings.fingerprint,
            **self.figures(),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        used = self.usage()
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **used["prompt_tokens_details"]},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_thought_tokens},
            "total_tokens": used["total_tokens"],
        }

    def _place(self, block: Block) -> int:
        return next(n for n, each in enumerate(self.shown) if each is block)

    def _id(self, block: Block) -> str:
        """Return the id of a block's item."""
        prefix = {"thoughts": "rs", "text": "msg", "call": "fc"}[block.kind]
        return self._ids.setdefault(block.number, f"{prefix}_{uuid.uuid4().hex}")

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Return a block as an item; only the last one can be incomplete."""
        last = block is self.blocks.all[-1]
        status = "completed" if status == "completed" or not last else status
        own = {"id": self._id(block), "status": "incomplete" if status == "cancelled" else status}
        if block.kind == "thoughts":
            content = [{"type": "reasoning_text", "text": block.text}] if block.text else []
            return {
                **own,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
            }
        if block.call is not None:
            return {
                **own, "type": "function_call", "call_id": block.call.id, "name": block.call.name,
                "arguments": block.text,
            }  # fmt: skip
        content = [] if status == "in_progress" and not block.text else [self._part(block)]
        return {**own, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, empty: bool = False) -> dict[str, Any]:
        """Return the part of an item that has its text."""
        text = "" if empty else block.text
        if block.kind == "thoughts":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if empty else self._logprobs(0)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, start: int) -> list[dict[str, Any]]:
        """Return the log probabilities of tokens from ``start`` on; none unless asked for."""
        if not self.body.logprobs:
            return []
        sample, outputs = self.sample, self.service.llm.inputs.outputs
        listed = sample.logprobs[start:], sample.token_ids[start:]
        found = chat_logprobs(*listed, self.body.top_logprobs or 0, outputs)["content"]
        return list(found)

    def _told(self, change: Change) -> Iterator[dict[str, Any]]:
        """Yield the events of a change of a block."""
        block = change.block
        item = {"item_id": self._id(block), "output_index": self._place(block)}
        where, at = {**item, "content_index": 0}, {"output_index": item["output_index"]}
        if change.what == "begins":
            yield self._event(
                "response.output_item.added", **at, item=self._item(block, "in_progress")
            )
            if block.call is None:
                part = self._part(block, empty=True)
                yield self._event("response.content_part.added", **where, part=part)
        elif change.what == "more":
            yield self._more(block, change.text, item, where)
        else:
            yield from self._done(block, item, where)
            status = "completed" if self.sample.finish_reason in (None, "stop") else "incomplete"
            yield self._event("response.output_item.done", **at, item=self._item(block, status))

    def _more(
        self, block: Block, text: str, item: dict[str, Any], where: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the event of more text of a block."""
        if block.call is not None:
            return self._event("response.function_call_arguments.delta", **item, delta=text)
        if block.kind == "thoughts":
            return self._event("response.reasoning_text.delta", **where, delta=text)
        start, self._shown_logprobs = self._shown_logprobs, len(self.sample.logprobs)
        logprobs = self._logprobs(start)
        return self._event("response.output_text.delta", **where, delta=text, logprobs=logprobs)

    def _done(
        self, block: Block, item: dict[str, Any], where: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield the events that repeat a block's text when it ends."""
        if block.call is not None:
            told = {"arguments": block.text, "name": block.call.name}
            yield self._event("response.function_call_arguments.done", **item, **told)
            return
        if block.kind == "thoughts":
            yield self._event("response.reasoning_text.done", **where, text=block.text)
        else:
            more = {"text": block.text, "logprobs": self._logprobs(0)}
            yield self._event("response.output_text.done", **where, **more)
        yield self._event("response.content_part.done", **where, part=self._part(block))


def cancelled(service: Service, id: str, owner: int | None) -> dict[str, Any]:
    """Cancel a response that runs; return it. Raises Refusal: it is not kept, or has ended."""
    kept = service.responses.get(id, owner)
    if kept.cancel is None:
        raise Refusal(f"the response is {kept.answer['status']}; only one that runs is cancelled.")
    kept.cancel()
    kept.answer = {**kept.answer, "status": "cancelled"}
    return kept.answer
