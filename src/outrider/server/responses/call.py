"""``/v1/responses``: a chat in the form of OpenAI's Responses API."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Request as HttpRequest

from ...errors import OutriderError, shown
from ...text.called import ToolCall
from ..answer import chat_logprobs
from ..blocks import Block, BlockCall, Change
from ..errors import Refusal, error_body
from ..protocol import ChatRequest
from ..service import Service
from .body import ResponsesRequest
from .store import Kept, Store


class Responses(BlockCall):
    """A call of the Responses API; its answer is a list of items."""

    prefix = "resp"
    chunk_kind = "response"
    names: Mapping[str, str] = MappingProxyType({
        "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format", "structured_outputs": "text.format",
        "reasoning_effort": "reasoning.effort", "logprobs": "top_logprobs", "messages": "input",
        "prompt": "input",
    })  # fmt: skip

    def __init__(self, service: Service, asked: ResponsesRequest, http: HttpRequest) -> None:
        store, self.owner = service.responses, http.state.key
        body = chat_of(asked, store, self.owner)
        super().__init__(service, body, http)
        self.id = f"resp_{uuid.uuid4().hex}"  # not the client's, which others may know
        self.asked_for = asked
        self.keeps = bool(store.most) and asked.store is not False
        own = body.messages[1:] if asked.instructions else body.messages
        self.messages = own if self.keeps else []
        self._number = 0
        self._ids: dict[int, str] = {}
        self._listed = 0
        """Number of tokens whose log probabilities a stream has listed or skipped."""

    def build(self) -> dict[str, Any]:
        self.finish()
        return self._ended()

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream."""
        answer: dict[str, Any] | None = None
        begun = False
        try:
            async for changes in self.changes():
                if not begun:
                    begun = True
                    response = self._object("in_progress")
                    self._keep(response, [])
                    yield self._event("response.created", response=response)
                    yield self._event("response.in_progress", response=response)
                for change in changes:
                    for event in self._told(change):
                        yield event
            answer = self._ended()
        finally:
            if begun and answer is None:  # it failed, or its client is gone
                self.cancelled = True
                self._keep(self._object("cancelled"), [])
        kind = "completed" if answer["status"] == "completed" else "incomplete"
        yield self._event(f"response.{kind}", response=answer)

    def failed(self, error: OutriderError) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream that fails midway."""
        told = error_body(error)["error"]
        code = "invalid_prompt" if str(told["code"]).startswith("4") else "server_error"
        message, param = told["message"], told["param"]
        answer = self._object("failed") | {"error": {"code": code, "message": message}}
        self._keep(answer, [])
        yield self._event("error", code=str(told["code"]), message=message, param=param)
        yield self._event("response.failed", response=answer)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event with its number in the stream."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _ended(self) -> dict[str, Any]:
        """Return the response at its end, and store it if that is allowed."""
        whole = self.sample.finish_reason == "stop" and self.calls_whole
        status = "cancelled" if self.cancelled else "completed" if whole else "incomplete"
        answer = self._object(status)
        self._keep(answer, [self._answered()])
        return answer

    def _keep(self, answer: dict[str, Any], answered: list[dict[str, Any]]) -> None:
        """Store the response as it is now, if the server stores any and it was not deleted."""
        if self.keeps:
            runs = self.cancel if answer["status"] == "in_progress" else None
            kept = Kept([*self.messages, *answered], answer, runs)
            self.service.responses.put(self.id, self.owner, kept)

    def _answered(self) -> dict[str, Any]:
        """Return the assistant's message, as the next call of the conversation repeats it."""
        texts = dict.fromkeys(("thoughts", "text"), "")
        for block in self.blocks.all:
            if block.kind != "call":
                texts[block.kind] += block.text
        message: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
        if texts["thoughts"]:
            message["reasoning"] = texts["thoughts"]
        calls = [ToolCall(each.name, each.text).as_json(each.id) for each in self.calls]
        return message | ({"tool_calls": calls} if calls else {})

    def cancel(self, forget: bool = False) -> None:
        """End the response at its next step; if it is to be ``forget``-ed, store nothing."""
        self.cancelled, self.keeps = True, self.keeps and not forget

    def _object(self, status: str) -> dict[str, Any]:
        """Return the response so far; at its beginning it has no items."""
        asked, body, settings = self.asked_for, self.body, self.service.settings
        runs = status == "in_progress"
        cut = status == "incomplete" and self.sample.finish_reason == "length"
        params = self.states[0].request.params
        form = asked.text.format if asked.text else None
        shape = (
            {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        )
        items = [] if runs else [self._item(block, status == "completed") for block in self.shown]
        return {
            "id": self.id, "object": "response", "created_at": float(self.created),
            "completed_at": None if runs else time.time(), "status": status, "background": False,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None, "model": body.model or self.service.name, "output": items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "safety_identifier": asked.safety_identifier, "service_tier": "default",
            "store": self.keeps, "temperature": params.temperature,
            "text": {"format": shape, "verbosity": "medium"},
            "tool_choice": asked.tool_choice or ("auto" if asked.tools else "none"),
            "tools": asked.tools or [], "top_logprobs": asked.top_logprobs or 0,
            "top_p": params.top_p, "truncation": asked.truncation,
            "usage": None if runs else self._usage(), "user": asked.user,
            "metadata": asked.metadata or {}, "system_fingerprint": settings.fingerprint,
            **self.figures(), **({} if runs else self._raw()),
        }  # fmt: skip

    def _raw(self) -> dict[str, Any]:
        """Return prompt and output as text and token ids if vLLM's field asks for them."""
        if not self.asked_for.enable_response_messages:
            return {}
        prompt = list(self.states[0].request.prompt_token_ids)
        texts = self.service.llm.inputs.outputs.decode(prompt), self.sample.text
        pairs = zip(texts, (prompt, self.sample.token_ids), strict=True)
        kind = "raw_message_tokens"
        both = [[{"type": kind, "message": text, "tokens": ids}] for text, ids in pairs]
        return dict(zip(("input_messages", "output_messages"), both, strict=True))

    def _usage(self) -> dict[str, Any]:
        used = self.usage()
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **used["prompt_tokens_details"]},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_thought_tokens},
            "total_tokens": used["total_tokens"],
        }

    def _id(self, block: Block) -> str:
        """Return the id of a block's item."""
        prefix = {"thoughts": "rs", "text": "msg", "call": "fc"}[block.kind]
        return self._ids.setdefault(block.number, f"{prefix}_{uuid.uuid4().hex}")

    def _item(self, block: Block, ended: bool, begins: bool = False) -> dict[str, Any]:
        """Return a block as an item, empty if it ``begins``.

        The last item of an answer that has not ``ended`` by itself is incomplete.
        """
        whole = ended or block is not self.blocks.all[-1]
        if block.kind == "call":
            whole = whole and self.is_whole(block)
        status = "in_progress" if begins else "completed" if whole else "incomplete"
        own = {"id": self._id(block), "status": status}
        if block.kind == "call":
            return {
                **own, "type": "function_call", "call_id": block.id, "name": block.name,
                "arguments": "" if begins else block.text,
            }  # fmt: skip
        content = [] if begins else [self._part(block)]
        if block.kind == "thoughts":
            more = {"summary": [], "content": content, "encrypted_content": None}
            return {**own, "type": "reasoning", **more}
        return {**own, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, begins: bool = False) -> dict[str, Any]:
        """Return the part of an item that has its text."""
        text = "" if begins else block.text
        if block.kind == "thoughts":
            return {"type": "reasoning_text", "text": text}
        logprobs = [] if begins else self._logprobs(block)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, block: Block, start: int = 0, stop: int | None = None) -> list[Any]:
        """Return the log probabilities of a text's tokens; none unless asked for.

        Of all tokens only those from ``start`` to ``stop`` are listed.
        """
        if not self.body.logprobs:
            return []
        sample, outputs = self.sample, self.service.llm.inputs.outputs
        # Thoughts may contain the same text.
        begin = sample.text.find(block.text, self.read(sample).answer_begins)
        places = [len(sample.text[:end].encode(errors="replace"))
                  for end in (begin, begin + len(block.text))]  # fmt: skip
        shown = outputs.shown(self.states[0].request)
        first, last = (self.reader.num_tokens_before(sample, place, shown) for place in places)
        first, last = max(first, start), last if stop is None else min(last, stop)
        listed = sample.logprobs[first:last], sample.token_ids[first:last]
        found = chat_logprobs(*listed, self.body.top_logprobs or 0, outputs)["content"]
        return list(found)

    def _told(self, change: Change) -> Iterator[dict[str, Any]]:
        """Yield the events of a change of a block."""
        block = change.block
        item = {"item_id": self._id(block), "output_index": self.place(block)}
        where, at = {**item, "content_index": 0}, {"output_index": item["output_index"]}
        if change.what == "begins":
            begun = self._item(block, False, begins=True)
            yield self._event("response.output_item.added", **at, item=begun)
            if block.kind != "call":
                part = self._part(block, begins=True)
                yield self._event("response.content_part.added", **where, part=part)
        elif change.what == "more":
            yield self._more(block, change.text, item, where)
        else:
            yield from self._done(block, item, where)
            ended = not self.cancelled and self.sample.finish_reason in (None, "stop")
            done = self._item(block, ended)
            yield self._event("response.output_item.done", **at, item=done)

    def _more(
        self, block: Block, text: str, item: dict[str, Any], where: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the event of more text of a block."""
        if block.kind == "call":
            return self._event("response.function_call_arguments.delta", **item, delta=text)
        if block.kind == "thoughts":
            return self._event("response.reasoning_text.delta", **where, delta=text)
        start, self._listed = self._listed, len(self.sample.logprobs)
        logprobs = self._logprobs(block, start)
        return self._event("response.output_text.delta", **where, delta=text, logprobs=logprobs)

    def _done(
        self, block: Block, item: dict[str, Any], where: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield the events that repeat a block's text when it ends."""
        if block.kind == "call":
            told = {"arguments": block.text, "name": block.name}
            yield self._event("response.function_call_arguments.done", **item, **told)
            return
        if block.kind == "thoughts":
            yield self._event("response.reasoning_text.done", **where, text=block.text)
        else:
            more = {"text": block.text, "logprobs": self._logprobs(block)}
            yield self._event("response.output_text.done", **where, **more)
        yield self._event("response.content_part.done", **where, part=self._part(block))


def chat_of(asked: ResponsesRequest, store: Store, owner: int | None) -> ChatRequest:
    """Return the chat that a body asks for, after the response it names. Raises Refusal."""
    id = asked.previous_response_id
    return asked.chat([] if id is None else ended_messages(store, id, owner))


def ended_messages(store: Store, id: str, owner: int | None) -> list[dict[str, Any]]:
    """Return the messages of a response that a call continues. Raises Refusal: there is none.

    A response that runs, failed or was cancelled has no answer to continue.
    """
    if not id.startswith("resp_"):
        raise Refusal(
            f"previous_response_id is {shown(id)}; ids of responses begin with resp_.",
            "previous_response_id",
        )
    kept = store.get(id, owner, "previous_response_id")
    if kept.answer["status"] not in ("completed", "incomplete"):
        raise Refusal(
            f"the response is {kept.answer['status'].replace('_', ' ')}; continue from one that "
            "has ended.", "previous_response_id",
        )  # fmt: skip
    return kept.messages


def cancelled(service: Service, id: str, owner: int | None) -> dict[str, Any]:
    """Cancel a running response; return it. Raises Refusal: it is not stored, or has ended."""
    kept = service.responses.get(id, owner)
    if kept.cancel is None:
        status = kept.answer["status"]
        raise Refusal(f"Cannot cancel a synchronous response: it is {status}, and no longer runs.")
    kept.cancel()
    return {**kept.answer, "status": "cancelled"}


def forgotten(service: Service, id: str, owner: int | None) -> None:
    """Delete a response; cancel it if it runs. Raises Refusal: it is not stored."""
    kept = service.responses.get(id, owner)
    if kept.cancel is not None:
        kept.cancel(True)
    service.responses.drop(id, owner)
