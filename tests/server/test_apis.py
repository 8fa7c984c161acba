"""Responses and messages, by the SDKs' own clients and types, and beside chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from outrider.server.app import create_app
from outrider.server.settings import Settings
from outrider.text.reasoning import FORMS
from tests.support.echo import Scripted

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCRIPTS = {
    "text": "the quick fox",
    "thoughts": "<think>\nso it is\n</think>\n\nthe fox",
    "only thoughts": "<think>so it is",
    "call": CALL,
    "all": f"<think>so</think>I look.\n{CALL}\n{CALL}",
    "empty": "",
}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
EVENTS: Any = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENTS: Any = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Scripted:
    return Scripted(tiny_llama, None)


@contextmanager
def front(engine: Scripted, script: str, **settings: Any) -> Iterator[TestClient]:
    """A client of a server that says ``script``."""
    engine.script = script
    app = create_app(engine, Settings(names=("tiny",), reasoning=FORMS["qwen3"], **settings))
    with TestClient(app, "http://localhost") as client:
        yield client


def of_openai(client: TestClient) -> openai.OpenAI:
    url = "http://localhost/v1"
    return openai.OpenAI(base_url=url, api_key="k", max_retries=0, http_client=client)


def of_anthropic(client: TestClient) -> anthropic.Anthropic:
    url = "http://localhost"
    return anthropic.Anthropic(base_url=url, api_key="k", max_retries=0, http_client=client)


TOOLS: Any = [{"type": "function", "name": "add", "parameters": ADD}]
ALSO: Any = [{"name": "add", "input_schema": ADD}]
HI: Any = [{"role": "user", "content": "hi"}]
PARTS = {
    "text": ("", "the quick fox", 0), "thoughts": ("so it is", "the fox", 0),
    "only thoughts": ("so it is", "", 0), "call": ("", "", 1), "all": ("so", "I look.", 2),
    "empty": ("", "", 0),
}  # fmt: skip


def blocks_of(parts: tuple[str, str, int]) -> list[tuple[str, Any]]:
    """The blocks that an answer has."""
    thoughts, text, calls = parts
    blocks: list[tuple[str, Any]] = [("thoughts", thoughts)] if thoughts else []
    blocks += [("text", text)] if text or not calls else []
    return blocks + [("call", {"a": 1})] * calls


def items_of(response: Response) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for item in response.output:
        if item.type == "reasoning":
            found.append(("thoughts", "".join(part.text for part in item.content or [])))
        elif item.type == "message":
            (part,) = item.content
            assert part.type == "output_text"
            found.append(("text", part.text))
        else:
            assert item.type == "function_call"
            found.append(("call", json.loads(item.arguments)))
    return found


def said_of(message: Message) -> list[tuple[str, Any]]:
    names = {"thinking": "thoughts", "text": "text", "tool_use": "call"}
    values = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(names[b.type], getattr(b, values[b.type])) for b in message.content]


@pytest.mark.parametrize("name", SCRIPTS)
def test_responses(name: str, engine: Scripted) -> None:
    expected = blocks_of(PARTS[name])
    with front(engine, SCRIPTS[name]) as client:
        ask = {"model": "tiny", "input": "hi", "tools": TOOLS}
        answer = client.post("/v1/responses", json=ask).raise_for_status().json()
        whole = Response.model_validate(answer, strict=False)
        assert items_of(whole) == expected
        assert whole.status == "completed"
        assert whole.usage is not None
        thoughts = SCRIPTS[name].startswith("<think>")
        assert (whole.usage.output_tokens_details.reasoning_tokens > 0) is thoughts
        with of_openai(client).responses.stream(**ask) as stream:  # type: ignore[call-overload]
            count = sum(1 for _ in stream)
            final = stream.get_final_response()
        raw = client.post("/v1/responses", json={**ask, "stream": True}).text
    assert items_of(final) == expected
    assert final.usage == whole.usage
    sent = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")]
    named = [line[7:] for line in raw.splitlines() if line.startswith("event: ")]
    assert named == [event["type"] for event in sent]
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    for event in sent:
        EVENTS.validate_python(event)
    assert count >= len(sent)
    check_order(sent)


def check_order(events: list[dict[str, Any]]) -> None:
    """Each item begins, grows and ends before the next one."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == "completed"
    assert events[0]["response"]["output"] == []
    opened: int | None = None
    grown = ""
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        if kind == "output_item.added":
            assert opened is None
            opened, grown = event["output_index"], ""
            assert event["item"]["status"] == "in_progress"
        assert event["output_index"] == opened
        if kind.endswith(".delta"):
            grown += event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == grown
        elif kind.endswith("arguments.done"):
            assert event["arguments"] == grown
        elif kind == "output_item.done":
            assert events[-1]["response"]["output"][opened] == event["item"]
            opened = None
    assert opened is None


@pytest.mark.parametrize("name", SCRIPTS)
def test_messages(name: str, engine: Scripted) -> None:
    expected, calls = blocks_of(PARTS[name]), PARTS[name][2]
    with front(engine, SCRIPTS[name]) as client:
        ask: Any = {"model": "tiny", "messages": HI, "tools": ALSO, "max_tokens": 99}
        answer = client.post("/v1/messages", json=ask).raise_for_status().json()
        whole = Message.model_validate(answer)
        assert said_of(whole) == expected
        assert whole.stop_reason == ("tool_use" if calls else "end_turn")
        with of_anthropic(client).messages.stream(**ask) as stream:
            for _ in stream:
                pass
            final = stream.get_final_message()
        raw = client.post("/v1/messages", json={**ask, "stream": True}).text
    assert said_of(final) == expected
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason, whole.usage.output_tokens,
    )  # fmt: skip
    sent = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")]
    for event in sent:
        MESSAGE_EVENTS.validate_python(event)
    assert [line[7:] for line in raw.splitlines() if line.startswith("event: ")] == [
        event["type"] for event in sent
    ]
    opened = [event["index"] for event in sent if event["type"] == "content_block_start"]
    assert opened == list(range(len(expected)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_chats(name: str, engine: Scripted) -> None:
    thoughts, text, calls = PARTS[name]
    tools = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    with front(engine, SCRIPTS[name]) as client:
        ask: Any = {"model": "tiny", "messages": HI, "tools": tools}
        completions = of_openai(client).chat.completions
        whole = completions.create(**ask)
        streamed = list(completions.create(**ask, stream=True))
        hidden = completions.create(**ask, extra_body={"include_reasoning": False})
    message, deltas = whole.choices[0].message, [c.choices[0].delta for c in streamed if c.choices]
    for field in ("reasoning", "reasoning_content"):
        assert (getattr(message, field) or "") == thoughts
        assert "".join(getattr(delta, field, "") for delta in deltas) == thoughts
        assert getattr(hidden.choices[0].message, field) is None
    assert (message.content or "") == text == "".join(d.content or "" for d in deltas)
    assert hidden.choices[0].message.content == message.content
    assert len(message.tool_calls or []) == calls
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert bool(details.reasoning_tokens) is bool(thoughts)
