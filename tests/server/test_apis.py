"""Responses and messages, by the SDKs' own clients and types, and beside chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.testclient import TestClient

from outrider.server.app import create_app
from outrider.server.errors import Refusal
from outrider.server.responses.body import ResponsesRequest
from outrider.server.responses.call import Responses, cancelled, ended_messages, forgotten
from outrider.server.responses.store import Kept
from outrider.server.service import Service
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
            count, grown = 0, ""
            for event in stream:
                count += 1
                if event.type == "response.output_text.delta":
                    grown += event.delta
                    assert event.snapshot == grown
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
            assert not event["item"].get("content")
            assert not event["item"].get("arguments")
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
    assert sent[0]["message"]["usage"]["output_tokens"] == 0
    signed = [i for i, event in enumerate(sent) if "signature" in event.get("delta", {})]
    assert len(signed) == bool(PARTS[name][0])
    for place in signed:
        block = sent[place]["index"]
        assert sent[place + 1] == {"type": "content_block_stop", "index": block}
    with front(engine, SCRIPTS[name]) as client:
        omitted = {**ask, "thinking": {"type": "adaptive", "display": "omitted"}}
        seen = client.post("/v1/messages", json=omitted).raise_for_status().json()
    kinds = {block["type"] for block in seen["content"]}
    assert kinds == {block.type for block in whole.content} - {"thinking"}


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
        assert "".join(getattr(delta, field, None) or "" for delta in deltas) == thoughts
        assert getattr(hidden.choices[0].message, field) is None
    assert (message.content or "") == text == "".join(d.content or "" for d in deltas)
    assert hidden.choices[0].message.content == message.content
    assert len(message.tool_calls or []) == calls
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert bool(details.reasoning_tokens) is bool(thoughts)
    assert whole.usage.reasoning_tokens == details.reasoning_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["text", "thoughts", "only thoughts", "all"])
def test_thoughts_stay_in_the_content_or_come_at_once(name: str, engine: Scripted) -> None:
    thoughts, text, _ = PARTS[name]
    tools = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
    ask: Any = {"messages": HI, "tools": tools}
    with front(engine, SCRIPTS[name]) as client:
        chat = "/v1/chat/completions"
        mixed = client.post(chat, json={**ask, "separate_reasoning": False}).json()
        parts = client.post(chat, json={**ask, "separate_reasoning": False, "stream": True}).text
        held = client.post(chat, json={**ask, "stream_reasoning": False, "stream": True}).text
    message = mixed["choices"][0]["message"]
    assert message["reasoning"] is None
    begins = SCRIPTS[name].removesuffix(CALL).removesuffix(f"{CALL}\n").strip()
    assert message["content"].strip() == begins

    def deltas(raw: str) -> list[dict[str, Any]]:
        sent = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        return [each["choices"][0]["delta"] for each in sent]

    assert "".join(each.get("content", "") for each in deltas(parts)) == message["content"]
    told = [each["reasoning_content"] for each in deltas(held)]
    assert [*filter(None, told)] == ([thoughts] if thoughts else [])
    assert "".join(each.get("content", "") for each in deltas(held)) == text


def test_a_response_tells_its_prompt_and_output_as_they_are(templated: Scripted) -> None:
    with front(templated, "<think>so</think>yes") as client:
        ask = {"input": "hello", "enable_response_messages": True}
        answer = client.post("/v1/responses", json=ask).json()
        assert "input_messages" not in client.post("/v1/responses", json={"input": "x"}).json()
    (given,), (said,) = answer["input_messages"], answer["output_messages"]
    assert given["type"] == said["type"] == "raw_message_tokens"
    assert (given["message"], said["message"]) == ("[user]hello[assistant]", "<think>so</think>yes")
    assert len(given["tokens"]) == answer["usage"]["input_tokens"]
    assert len(said["tokens"]) == answer["usage"]["output_tokens"]


def test_a_chat_echoes_the_beginning_of_its_answer(templated: Scripted) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "I say "}]
    more = {"continue_final_message": True, "echo": True}
    with front(templated, "hello") as client:

        def ask(messages: Any, **more: Any) -> Any:
            return client.post("/v1/chat/completions", json={"messages": messages, **more})

        assert ask(begun, **more).json()["choices"][0]["message"]["content"] == "I say hello"
        assert ask(HI, echo=True).json()["choices"][0]["message"]["content"] == "hello"
        raw = ask(begun, **more, stream=True).text
    sent = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    texts = [each["choices"][0]["delta"].get("content", "") for each in sent]
    assert texts[0] == "I say "
    assert "".join(texts) == "I say hello"


def test_hidden_tokens_of_thoughts_count(templated: Scripted) -> None:
    (end, *_) = templated.inputs.outputs.special_tokens
    with front(templated, f"<think>{end * 9}so</think>yes") as client:
        used = client.post("/v1/chat/completions", json={"messages": HI}).json()["usage"]
    plain = len(templated.inputs.codec.encode("yes", False, rendered=True))  # type: ignore[union-attr]
    assert used["reasoning_tokens"] == used["completion_tokens"] - plain - 1


def asked_text(engine: Scripted) -> str:
    """The prompt of the last call."""
    return engine.inputs.outputs.decode(engine.asked.prompt_token_ids)


ALL_ROLES = (
    "{% for m in messages %}[{{ m.role }}{% if m.reasoning_content %} {{ m.reasoning_content }}"
    "{% endif %}]{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }} "
    "{{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    "{% for t in tools or [] %};{{ t.function.name }}{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def templated(engine: Scripted) -> Iterator[Scripted]:
    """The engine with a template that prints all that there is."""
    codec = engine.inputs.codec
    assert codec is not None
    before, codec.chat_template = codec.chat_template, ALL_ROLES
    yield engine
    codec.chat_template = before


HISTORY = (
    '[system]Be brief.[user]a\nb[assistant so]I add.(add {"a": 1})(add {"a": 2})'
    "[tool]3[tool]4[user]and?[assistant]"
)


def test_a_conversation_is_the_same_by_every_api(templated: Scripted) -> None:
    """The same history reaches the template, in whatever items or blocks it comes."""
    calls = [{"a": 1}, {"a": 2}]
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "I add.", "annotations": []}]},
        *({"type": "function_call", "call_id": f"c{n}", "name": "add",
           "arguments": json.dumps(call)} for n, call in enumerate(calls)),
        {"type": "function_call_output", "call_id": "c0", "output": "3"},
        {"type": "function_call_output", "call_id": "c1",
         "output": [{"type": "input_text", "text": "4"}]},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    blocks: Any = [
        {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so", "signature": ""},
            {"type": "text", "text": "I add."},
            *({"type": "tool_use", "id": f"c{n}", "name": "add", "input": call}
              for n, call in enumerate(calls)),
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c0", "content": "3"},
            {"type": "tool_result", "tool_use_id": "c1",
             "content": [{"type": "text", "text": "4"}]},
            {"type": "text", "text": "and?"},
        ]},
    ]  # fmt: skip
    with front(templated, "yes") as client:
        of_openai(client).responses.create(model="tiny", input=items, instructions="Be brief.")
        assert asked_text(templated) == HISTORY
        ask: Any = {"model": "tiny", "messages": blocks, "system": "Be brief."}
        of_anthropic(client).messages.create(**ask, max_tokens=9)
        assert asked_text(templated) == HISTORY
        counted = of_anthropic(client).messages.count_tokens(**ask)
    assert counted.input_tokens == len(templated.asked.prompt_token_ids)


def test_options_reach_the_engine(templated: Scripted) -> None:
    own = {"seed": 7, "top_k": 3, "min_p": 0.1, "temperature": 0.5, "top_p": 0.9}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    with front(templated, "{}") as client:
        for path, more in (
            ("/v1/responses", {"input": "x", "max_output_tokens": 9, "text": {"format": form}}),
            ("/v1/messages", {"messages": HI, "max_tokens": 9, "stop_sequences": ["q"],
                              "output_config": {"format": form},
                              "thinking": {"type": "disabled"}}),
        ):  # fmt: skip
            client.post(path, json={**own, **more}).raise_for_status()
            params = templated.asked.params
            assert (params.seed, params.top_k, params.min_p) == (7, 3, 0.1)
            assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 9)
            assert params.structured_outputs is not None
            assert json.loads(params.structured_outputs.json) == schema  # type: ignore[union-attr, arg-type]
        assert params.stop == ("q",)
        assert asked_text(templated).endswith("False[assistant]")


def test_responses_are_kept_for_who_made_them(templated: Scripted) -> None:
    keys = {"Authorization": "Bearer one"}, {"x-api-key": "two"}
    with front(templated, "yes", store_responses=2, api_keys=("one", "two")) as client:

        def ask(**body: Any) -> Any:
            return client.post("/v1/responses", json={"input": "x", **body}, headers=keys[0])

        first = ask(input="one?", instructions="Be brief.").json()
        assert first["store"] is True
        second = ask(input="two?", previous_response_id=first["id"]).json()
        assert asked_text(templated) == "[user]one?[assistant]yes[user]two?[assistant]"
        path = f"/v1/responses/{first['id']}"
        assert client.get(path, headers=keys[0]).json() == first
        assert client.get(path, headers=keys[1]).status_code == 404
        other = client.post(
            "/v1/responses", json={"input": "x", "previous_response_id": first["id"]},
            headers=keys[1],
        )  # fmt: skip
        assert other.status_code == 404
        assert other.json()["error"]["param"] == "previous_response_id"
        ended = client.post(f"{path}/cancel", headers=keys[0])
        assert ended.status_code == 400
        assert "completed" in ended.json()["error"]["message"]
        hidden = ask(store=False).json()
        assert hidden["store"] is False
        assert client.get(f"/v1/responses/{hidden['id']}", headers=keys[0]).status_code == 404
        ask()  # has the place of the second, which was used least recently
        gone = client.get(f"/v1/responses/{second['id']}", headers=keys[0])
        assert gone.status_code == 404
        assert client.delete(path, headers=keys[0]).json()["deleted"] is True
        assert client.get(path, headers=keys[0]).status_code == 404
    with front(templated, "yes") as client:
        made = client.post("/v1/responses", json={"input": "x"}).json()
        assert made["store"] is False
        said = client.get(f"/v1/responses/{made['id']}").json()["error"]["message"]
        assert "--store-responses" in said


def test_the_kept_history_has_the_calls_that_were_told(templated: Scripted) -> None:
    with front(templated, f"I look.{CALL}", store_responses=2) as client:
        first = client.post("/v1/responses", json={"input": "x", "tools": TOOLS}).json()
        text, call = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        kept = client.app.state.service.responses.get(first["id"], None)  # type: ignore[attr-defined]
        assert kept.messages[-1]["tool_calls"][0]["id"] == call["call_id"]
        ask = {"input": [output], "tools": TOOLS}
        client.post("/v1/responses", json={**ask, "previous_response_id": first["id"]})
        behind = asked_text(templated)
        items = [{"role": "user", "content": "x"}, text, call, output]
        client.post("/v1/responses", json={"input": items, "tools": TOOLS})
        assert asked_text(templated) == behind


def run_until(
    client: TestClient, count: int, then: Callable[[Service, Responses], object]
) -> tuple[Responses, list[dict[str, Any]]]:
    """Stream a response; behind ``count`` events ``then`` is done, and the client stays if asked.

    It leaves where ``then`` returns True.
    """
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    call = Responses(
        service, ResponsesRequest.model_validate({"input": "x", "stream": True}),
        Request({"type": "http", "state": {"key": None, "request_id": "r", "body_bytes": 1}}),
    )  # fmt: skip

    async def run() -> list[dict[str, Any]]:
        await call.prepare()
        events, chunks = [], call.chunks()
        async for event in chunks:
            events.append(event)
            if len(events) == count and then(service, call):
                await chunks.aclose()  # type: ignore[attr-defined]
                break
        return events

    return call, asyncio.run(run())


def test_a_response_that_runs_is_cancelled(templated: Scripted) -> None:
    def then(service: Service, call: Responses) -> None:
        assert service.responses.get(call.id, None).answer["status"] == "in_progress"
        with pytest.raises(Refusal, match="in progress; continue from one that has ended"):
            ended_messages(service.responses, call.id, None)
        assert cancelled(service, call.id, None)["status"] == "cancelled"

    with front(templated, "the quick fox", store_responses=2) as client:
        call, events = run_until(client, 5, then)
        kept = client.get(f"/v1/responses/{call.id}").json()
    (item,) = events[-1]["response"]["output"]
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"] == kept
    assert (kept["status"], item["status"]) == ("cancelled", "incomplete")
    assert events[-2]["item"] == item
    assert 0 < len(item["content"][0]["text"]) < len("the quick fox")


def test_one_that_runs_is_kept_however_many_end_meanwhile(templated: Scripted) -> None:
    with front(templated, "the quick fox", store_responses=2) as client:

        def then(service: Service, call: Responses) -> None:
            for number in range(4):
                service.responses.put(f"resp_{number}", None, Kept([], {"status": "completed"}))
            assert service.responses.get(call.id, None).answer["status"] == "in_progress"
            assert len(service.responses._kept[None]) == 2
            cancelled(service, call.id, None)

        call, _ = run_until(client, 5, then)
        path = f"/v1/responses/{call.id}"
        assert client.get(path).json()["status"] == "cancelled"
        assert "cannot be streamed again" in client.get(path, params={"stream": "true"}).text


def test_a_client_that_leaves_cancels_its_response(templated: Scripted) -> None:
    with front(templated, "the quick fox", store_responses=2) as client:
        call, _ = run_until(client, 5, lambda *_: True)
        path = f"/v1/responses/{call.id}"
        assert client.get(path).json()["status"] == "cancelled"
        assert client.post(f"{path}/cancel").status_code == 400
        more = {"input": "x", "previous_response_id": call.id}
        assert "continue from one" in client.post("/v1/responses", json=more).text


def test_a_response_that_is_deleted_while_it_runs_stays_so(templated: Scripted) -> None:
    def then(service: Service, call: Responses) -> None:
        forgotten(service, call.id, None)

    with front(templated, "the quick fox", store_responses=2) as client:
        call, _ = run_until(client, 5, then)
        assert client.get(f"/v1/responses/{call.id}").status_code == 404


def test_each_key_has_room_of_its_own(templated: Scripted) -> None:
    with front(templated, "yes", store_responses=2, api_keys=("one", "two")) as client:

        def ask(key: str) -> str:
            headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "shared"}
            made = client.post("/v1/responses", json={"input": "x"}, headers=headers)
            return str(made.json()["id"])

        mine = ask("one")
        assert len({mine, *(ask("two") for _ in range(5))}) == 6
        headers = {"Authorization": "Bearer one"}
        assert client.get(f"/v1/responses/{mine}", headers=headers).status_code == 200


def test_what_is_cut_is_incomplete(templated: Scripted) -> None:
    cut = '<tool_call>\n{"name": "add", "arguments": {"a": '
    with front(templated, cut, store_responses=1) as client:
        made = client.post("/v1/responses", json={"input": "x", "tools": TOOLS}).json()
        (item,) = made["output"]
        assert (made["status"], item["status"]) == ("incomplete", "incomplete")
        ask = {"messages": HI, "tools": ALSO, "max_tokens": 99}
        assert client.post("/v1/messages", json=ask).json()["stop_reason"] == "end_turn"


def test_log_probabilities_are_those_of_the_text(templated: Scripted) -> None:
    more = {"input": "x", "include": ["message.output_text.logprobs"], "tools": TOOLS}
    with front(templated, SCRIPTS["all"]) as client:
        whole = client.post("/v1/responses", json=more).json()
        raw = client.post("/v1/responses", json={**more, "stream": True}).text
    text = next(item for item in whole["output"] if item["type"] == "message")["content"][0]
    assert "".join(each["token"] for each in text["logprobs"]) == "I look."
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")]
    told = [each["token"] for event in events if event["type"] == "response.output_text.delta"
            for each in event["logprobs"]]  # fmt: skip
    assert "".join(told) == "I look."
    with front(templated, "<think>the fox</think>the fox") as client:
        raw = client.post("/v1/responses", json={**more, "stream": True}).text
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")]
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert "".join(each["token"] for each in event["logprobs"]) == event["delta"]


REFUSED = [
    ("responses", {"n": 3}), ("responses", {"logprobs": True}), ("responses", {"max_tokens": 2}),
    ("responses", {"response_format": {"type": "json_object"}}), ("responses", {"include": ["x"]}),
    ("responses", {"guided_regex": "a"}), ("responses", {"use_beam_search": True}),
    ("messages", {"n": 2}), ("messages", {"logprobs": True}),
    ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    ("messages", {"chat_template_kwargs": "x", "thinking": {"type": "enabled"}}),
    ("messages", {"thinking_token_budget": -2}), ("messages", {"thinking_token_budget": 2**31}),
    ("messages", {"structured_outputs": {"opening": "<think>"}}),
    ("messages", {"messages": [{"role": "assistant", "content": [{"type": "thinking",
                                                                  "thinking": {"a": 1}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "redacted_thinking"}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("api", "more"), REFUSED)
def test_nothing_that_asks_for_something_is_dropped(
    api: str, more: dict[str, Any], templated: Scripted
) -> None:
    own: Any = {"input": "x"} if api == "responses" else {"messages": HI, "max_tokens": 5}
    neutral = {"n": 1, "logprobs": False, "use_beam_search": False}
    with front(templated, "yes") as client:
        answer = client.post(f"/v1/{api}", json={**own, **more})
        assert client.post(f"/v1/{api}", json={**own, **neutral}).status_code == 200
        counted = client.post("/v1/messages/count_tokens", json={"messages": HI, "n": 3})
        assert counted.status_code == 200
    assert answer.status_code == 400
    name = next(iter(more))
    assert (name if name in ("n", "logprobs") else "; ") in answer.json()["error"]["message"]


ACCEPTED = [
    ("messages", {"messages": [
        *HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add"}]},
        {"role": "user", "content": [{"type": "tool_result", "id": "c", "content": "2"}]},
    ]}),
    ("responses", {"tool_choice": "auto"}), ("responses", {"tool_choice": "auto", "tools": []}),
    ("messages", {"context_management": {"edits": []}}),
    ("messages", {"context_management": {
        "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
    }}),
]  # fmt: skip


@pytest.mark.parametrize(("api", "more"), ACCEPTED)
def test_what_asks_for_nothing_is_accepted(
    api: str, more: dict[str, Any], templated: Scripted
) -> None:
    own: Any = {"input": "x"} if api == "responses" else {"messages": HI, "max_tokens": 5}
    with front(templated, "yes") as client:
        client.post(f"/v1/{api}", json={**own, **more}).raise_for_status()


def test_a_model_without_thoughts_keeps_within_every_budget(templated: Scripted) -> None:
    asks: dict[str, Any] = {
        "messages": {"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        "chat/completions": {"thinking_token_budget": 0},
    }
    templated.script = "yes"
    app = create_app(templated, Settings(names=("tiny",)))
    with TestClient(app, "http://localhost") as client:
        for path, ask in asks.items():
            client.post(f"/v1/{path}", json={"messages": HI, **ask}).raise_for_status()


def test_an_effort_is_a_hint(templated: Scripted) -> None:
    efforts = {"responses": {"input": "hi", "reasoning": {"effort": "none"}},
               "messages": {"messages": HI, "max_tokens": 5,
                            "output_config": {"effort": "none"}}}  # fmt: skip
    with front(templated, "yes") as client:
        for path, ask in efforts.items():
            client.post(f"/v1/{path}", json=ask).raise_for_status()
            assert asked_text(templated) == "[user]hiFalse[assistant]"
        bad = client.post("/v1/responses", json={"input": "x", "reasoning": {"effort": "much"}})
        assert bad.status_code == 400
        count = client.post("/v1/responses/input_tokens", json=efforts["responses"]).json()
        assert count["input_tokens"] == len(templated.asked.prompt_token_ids)
        empty = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None}
        items = [{"role": "user", "content": "a"}, empty, {"role": "user", "content": "b"}]
        client.post("/v1/responses", json={"input": items}).raise_for_status()
        assert asked_text(templated) == "[user]a[user]b[assistant]"


def test_a_prefill_may_end_within_thoughts(templated: Scripted) -> None:
    with front(templated, "so</think>yes") as client:
        for content in ("<think>abc", [{"type": "text", "text": "<think>abc"}]):
            ask = {"messages": [*HI, {"role": "assistant", "content": content}], "max_tokens": 9}
            said = client.post("/v1/messages", json=ask).json()["content"]
            assert [block["type"] for block in said] == ["thinking", "text"]


def test_thoughts_before_and_behind_reach_the_template(templated: Scripted) -> None:
    thoughts = [
        {"type": "reasoning", "id": text, "summary": [], "content": [{"type": "reasoning_text",
                                                                      "text": text}]}
        for text in ("one", "two")
    ]  # fmt: skip
    items = [{"role": "user", "content": "a"}, *thoughts, {"role": "user", "content": "b"}]
    with front(templated, "yes") as client:
        client.post("/v1/responses", json={"input": items}).raise_for_status()
        assert asked_text(templated) == "[user]a[assistant one\ntwo][user]b[assistant]"


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("responses", {"input": []}, "input is empty"),
    ("responses", {"input": 5}, "input: "),
    ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "only functions are served"),
    ("responses", {"input": "x", "background": True}, "background: this server does not"),
    ("responses", {"input": "x", "conversation": "c"}, "give previous_response_id"),
    ("responses", {"input": [{"type": "computer_call"}]}, "input[0] is of type 'computer_call'"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input[0].content has a part of type 'input_image'; only text is served."),
    ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "lacks name, call_id"),
    ("responses", {"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice is of type 'mcp'"),
    ("responses", {"input": "x", "previous_response_id": "resp_r"},
     "Response with id 'resp_r' not found"),
    ("responses", {"input": "x", "previous_response_id": "r"}, "begin with resp_."),
    ("responses", {"input": "x", "temperature": 1e999}, "temperature is inf; give 0"),
    ("responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens is 0"),
    ("responses", {"input": "x", "seed": 2**70}, "seed"),
    ("messages", {"messages": HI}, "max_tokens: field required"),
    ("messages", {"messages": [], "max_tokens": 5}, "messages: "),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5},
     "messages[0].content[0] has a block of type 'image'; only text is served."),
    ("messages", {"messages": [{"role": "tool", "content": "x"}], "max_tokens": 5}, "lacks a role"),
    ("messages", {"messages": HI, "max_tokens": 5, "tools": [{"type": "bash_20250124"}]},
     "tools[0] is of type 'bash_20250124'"),
    ("messages", {"messages": HI, "max_tokens": 2**31}, "max_tokens is 2147483648"),
    ("messages", {"messages": HI, "max_tokens": 5, "thinking": {"type": "enabled",
                                                                "budget_tokens": 9}},
     "thinking.budget_tokens: this model's thinking cannot be limited"),
    ("messages", {"messages": HI, "max_tokens": 5, "model": "nope"}, "no model 'nope'"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}], "max_tokens": 5},
     "has a block of type 'text' without its text; give that."),
    ("messages", {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "", "content": "x"}]}], "max_tokens": 5},
     "has no tool_use_id; give one."),
    ("messages", {"messages": [{"role": "assistant", "content": [
        {"type": "tool_use", "id": "", "name": "f", "input": {}}]}], "max_tokens": 5},
     "lacks id, name or input; give all."),
    ("responses", {"input": "x", "top_logprobs": 99}, "top_logprobs is 99"),
    ("responses", {"input": "x", "tool_choice": "required"}, "tool_choice is 'required'"),
]  # fmt: skip


@pytest.mark.parametrize(("api", "body", "said"), ERRORS)
def test_errors_have_the_form_of_their_api(
    api: str, body: dict[str, Any], said: str, engine: Scripted
) -> None:
    with front(engine, "yes") as client:
        text = json.dumps(body).replace("Infinity", "1e999")
        answer = client.post(
            f"/v1/{api}", content=text, headers={"content-type": "application/json"}
        )
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["message"].endswith(".")
    if api == "messages":
        assert answer.json()["type"] == "error"
        assert error["type"] in ("invalid_request_error", "not_found_error")
    else:
        assert {"message", "type", "param", "code"} == set(error)


def test_a_key_is_asked_for_in_the_form_of_the_api(engine: Scripted) -> None:
    with front(engine, "yes", api_keys=("k",)) as client:
        refused = client.post("/v1/messages", json={"messages": HI, "max_tokens": 5})
        assert (refused.status_code, refused.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )
        assert of_anthropic(client).messages.create(
            model="tiny", messages=HI, max_tokens=5
        ).stop_reason == "end_turn"  # fmt: skip
        (model,) = of_anthropic(client).models.list().data
        assert (model.id, model.type, model.display_name) == ("tiny", "model", "tiny")


def test_an_answer_is_gone_on_with_by_every_api(templated: Scripted) -> None:
    talk = [*HI, {"role": "assistant", "content": "so far"}]
    more = {"continue_final_message": True}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": talk, **more}), ("responses", {"input": talk, **more}),
        ("messages", {"messages": talk, "max_tokens": 9}),
    ]  # fmt: skip
    with front(templated, "yes") as client:
        for path, ask in calls:
            client.post(f"/v1/{path}", json=ask).raise_for_status()
            assert asked_text(templated) == "[user]hi[assistant]so far", path
