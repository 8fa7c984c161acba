"""``/v1/messages``: a chat in the form of Anthropic's Messages API."""

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from fastapi import Request as HttpRequest

from ...errors import OutriderError
from ..blocks import Block, BlockCall, Change
from ..bodies import value_of
from ..errors import error_body, of_messages
from ..service import Service
from .body import MessagesRequest

DELTAS = {
    "thoughts": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type and field of a block's deltas, keyed by its kind."""


class Messages(BlockCall):
    """A call of the Messages API; its answer is a list of blocks."""

    prefix = "msg"
    chunk_kind = "message"
    names: Mapping[str, str] = MappingProxyType({
        "max_completion_tokens": "max_tokens", "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format": "output_config.format", "structured_outputs": "output_config.format",
        "reasoning_effort": "output_config.effort", "prompt": "messages",
    })  # fmt: skip

    def __init__(self, service: Service, asked: MessagesRequest, http: HttpRequest) -> None:
        super().__init__(service, asked.chat(), http)
        self.id = f"msg_{uuid.uuid4().hex}"

    def build(self) -> dict[str, Any]:
        self.finish()
        blocks = [self._block(block) for block in self.shown]
        return self._message() | {"content": blocks, **self._stop(), **self.figures()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a stream."""
        begun = False
        async for changes in self.changes():
            if not begun:
                begun = True
                begins = self._message()
                begins["usage"]["output_tokens"] = 0  # counted at the end
                yield {"type": "message_start", "message": begins}
            for change in changes:
                if change.what == "ends" and change.block.kind == "thoughts":
                    yield self._delta(change.block, "signature_delta", signature=self.id)
                yield self._event(change)
        last = {"delta": self._stop(), "usage": self._used(), **self.figures()}
        yield {"type": "message_delta", **last}
        yield {"type": "message_stop"}

    def failed(self, error: OutriderError) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream that fails midway."""
        yield of_messages(error_body(error), self.id)

    def _message(self) -> dict[str, Any]:
        """Return the message at its beginning."""
        return {
            "id": self.id, "type": "message", "role": "assistant",
            "model": self.body.model or self.service.name, "content": [], "stop_reason": None,
            "stop_sequence": None, "usage": self._used(),
        }  # fmt: skip

    def _used(self) -> dict[str, Any]:
        """Return the usage; cached prompt tokens are counted separately."""
        used = self.usage()
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": used["completion_tokens"],
        }

    def _stop(self) -> dict[str, Any]:
        """Return why the message ended."""
        sample = self.sample
        if self.calls and sample.finish_reason == "stop" and self.calls_whole:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if sample.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(sample.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _block(self, block: Block, empty: bool = False) -> dict[str, Any]:
        """Return a block of the answer; ``empty`` as it begins."""
        text = "" if empty else block.text
        if block.kind == "thoughts":
            return {"type": "thinking", "thinking": text, "signature": "" if empty else self.id}
        if block.kind == "text":
            return {"type": "text", "text": text}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": _object(text)}

    def _event(self, change: Change) -> dict[str, Any]:
        """Return the event of a change of a block."""
        block = change.block
        place = self.place(block)
        if change.what == "begins":
            begun = self._block(block, empty=True)
            return {"type": "content_block_start", "index": place, "content_block": begun}
        if change.what == "ends":
            return {"type": "content_block_stop", "index": place}
        kind, field = DELTAS[block.kind]
        return self._delta(block, kind, **{field: change.text})

    def _delta(self, block: Block, kind: str, **fields: str) -> dict[str, Any]:
        """Return the event of more of a block."""
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self.place(block), "delta": delta}


def _object(text: str) -> dict[str, Any]:
    """Return the object of a call's arguments; {} if they are cut off."""
    value: Any = {}
    with suppress(ValueError):
        value = value_of(text or "{}")
    return value if isinstance(value, dict) else {}
