"""Every known field is honoured, refused or ignored as the docs say; no value of any is a 500."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from outrider.params import StructuredOutputsParams
from outrider.server.app import create_app
from outrider.server.errors import Refusal
from outrider.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from outrider.server.settings import Settings
from outrider.server.unsupported import IGNORED, Unless
from tests.support import REPOSITORY
from tests.support.echo import Echo

DOCS = REPOSITORY / "docs" / "server.md"
MESSAGES: Any = [{"role": "user", "content": "for word"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MODELS: dict[str, Any] = {
    COMPLETIONS: CompletionRequest, CHATS: ChatRequest, "/tokenize": TokenizeRequest,
}  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "for"}, CHATS: {"messages": MESSAGES},
    "/tokenize": {"messages": MESSAGES},
}  # fmt: skip


@pytest.fixture(scope="module")
def front(tiny_llama: Path) -> Iterator[TestClient]:
    """The server's front in this process, over a model that costs nothing."""
    app = create_app(Echo(tiny_llama, None), Settings(names=("tiny",)))
    headers = {"Content-Type": "application/json"}
    url = "http://localhost"
    with TestClient(app, url, raise_server_exceptions=False, headers=headers) as found:
        yield found


def refused_fields(path: str) -> dict[str, Unless]:
    return {
        name: mark
        for name, field in MODELS[path].model_fields.items()
        for mark in field.metadata
        if isinstance(mark, Unless)
    }


def check_error(found: Any, param: str | None) -> None:
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    assert error["message"].endswith(".")
    assert len(error["message"]) < 500


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_refused_field_may_ask_for_nothing(front: TestClient, path: str) -> None:
    for name, mark in refused_fields(path).items():
        for value in (None, *mark.neutral):
            found = front.post(path, json=PLAIN[path] | {name: value})
            assert found.status_code == 200, (name, value, found.text)
        for value in ("x" * 10_000, 7, [7], {"a": 7}, json.loads("[" * 150 + "]" * 150)):
            if value not in mark.neutral:
                check_error(front.post(path, json=PLAIN[path] | {name: value}), name)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_an_ignored_or_unknown_field_changes_nothing(front: TestClient, path: str) -> None:
    plain = front.post(path, json=PLAIN[path] | {"seed": 1}).json()["choices"]
    for name in (*IGNORED, "provider", "a\0b", "a" * 10_000):
        assert name not in MODELS[path].model_fields
        text = json.dumps(PLAIN[path] | {"seed": 1, name: {"any": [1, "a\0b"]}})
        found = front.post(path, content=text)
        assert found.status_code == 200, (name, found.text)
        assert found.json()["choices"] == plain


def test_the_docs_list_every_field() -> None:
    text = DOCS.read_text(encoding="utf-8")
    listed = text[text.index("## Fields") :].partition("\n## ")[0]
    parts = dict(re.findall(r"\*\*(\w+)\*\*(.*?)(?=\n\n|\Z)", listed, re.S))
    named = {title: set(re.findall(r"`(\w+)`", part)) for title, part in parts.items()}
    refused = {path: set(refused_fields(path)) for path in (COMPLETIONS, CHATS)}
    everything = {
        path: set(MODELS[path].model_fields) - refused[path] for path in (COMPLETIONS, CHATS)
    }
    assert named["Honoured"] == everything[COMPLETIONS] & everything[CHATS]
    assert named["Completions"] == everything[COMPLETIONS] - everything[CHATS]
    assert named["Chats"] == everything[CHATS] - everything[COMPLETIONS]
    assert named["Refused"] == refused[COMPLETIONS] & refused[CHATS]
    assert named["Ignored"] == set(IGNORED)


def test_what_the_template_does_not_read_is_refused(front: TestClient) -> None:
    for name, value in (("documents", [{"text": "x"}]), ("reasoning_effort", "high")):
        for path in (CHATS, "/tokenize"):
            check_error(front.post(path, json=PLAIN[path] | {name: value}), name)
    for more in ({"documents": []}, {"reasoning_effort": "none"}):
        assert front.post(CHATS, json=PLAIN[CHATS] | more).status_code == 200


def test_what_the_template_reads_reaches_it(front: TestClient) -> None:
    codec = front.app.state.service.llm.inputs.codec  # type: ignore[attr-defined]
    before = codec.chat_template
    codec.chat_template = (
        "{% for d in documents or [] %}{{ d['text'] }};{% endfor %}"
        "{{ reasoning_effort }} {{ enable_thinking }}:{{ messages[-1]['content'] }}"
    )
    try:
        for more, shown in (
            ({"documents": [{"text": "a"}, {"text": "b"}]}, "a;b; :for word"),
            ({"reasoning_effort": "low"}, "low True:for word"),
            ({"reasoning_effort": "none"}, "none False:for word"),
            ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": 1}},
             "none 1:for word"),
        ):  # fmt: skip
            ids = front.post("/tokenize", json=PLAIN["/tokenize"] | more).json()["tokens"]
            text = front.post("/detokenize", json={"tokens": ids}).json()["prompt"]
            assert text == shown
            usage = front.post(CHATS, json=PLAIN[CHATS] | more).json()["usage"]
            assert usage["prompt_tokens"] == len(ids)
    finally:
        codec.chat_template = before


def test_parts_and_fields_that_are_no_text_are_refused(front: TestClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    deep = json.loads("[" * 150 + "]" * 150)
    for part in (image, sound, {"type": deep}, {"type": "file"}, "text", deep):
        message = {"role": "user", "content": [{"type": "text", "text": "x"}, part]}
        check_error(front.post(CHATS, json={"messages": [message]}), "messages")
    others: list[Any] = [{"audio": {"id": "x"}}, {"function_call": {"name": "f"}}]
    for more in others:
        message = {"role": "model", "content": "x", **more}
        check_error(front.post(CHATS, json={"messages": [*MESSAGES, message]}), "messages")


def test_names_of_the_template_call_are_not_the_clients(front: TestClient) -> None:
    for name in ("messages", "tools", "documents", "tokenize", "padding", "chat_template",
                 "continue_final_message", "sanitize_control_tokens", "self"):  # fmt: skip
        body = PLAIN[CHATS] | {"chat_template_kwargs": {name: True}}
        check_error(front.post(CHATS, json=body), "chat_template_kwargs")


def test_options_of_structured_outputs_are_not_dropped(front: TestClient) -> None:
    others: list[Any] = [
        {"whitespace_pattern": " "}, {"disable_any_whitespace": True}, {"json": {}},
        {"structural_tag": "x"}, {"disable_additional_properties": "some"},
    ]  # fmt: skip
    for more in others:
        body = PLAIN[CHATS] | {"structured_outputs": {"json_object": True, **more}}
        check_error(front.post(CHATS, json=body), "structured_outputs")


def test_where_a_form_begins_goes_with_a_form(front: TestClient) -> None:
    """In any field; without one, or in the call of a tool, nobody would see it."""
    after = {"structured_outputs": {"after": "("}}
    for more in (
        {"response_format": {"type": "json_object"}}, {"guided_regex": "a+"},
        {"structured_outputs": {"after": "(", "choice": ["a"]}},
    ):  # fmt: skip
        params = ChatRequest.model_validate(PLAIN[CHATS] | after | more).sampling(9, {})
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        assert params.structured_outputs.after == "("
    tool = {"type": "function", "function": {"name": "f"}}
    for more in (
        {}, {"response_format": {"type": "text"}}, {"tools": [tool], "tool_choice": "required"}
    ):  # fmt: skip
        check_error(front.post(CHATS, json=PLAIN[CHATS] | after | more), "structured_outputs")


@pytest.mark.parametrize(("said", "open_"), [(True, False), (None, False), (False, True)])
def test_who_says_so_gets_open_objects(said: bool | None, open_: bool) -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    strict = None if said is None else not open_
    for more in (
        {"structured_outputs": {"json": schema, "disable_additional_properties": said}},
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "x", "schema": schema, "strict": strict}}},
    ):  # fmt: skip
        params = ChatRequest.model_validate(PLAIN[CHATS] | more).sampling(9, {})
        form = params.structured_outputs
        assert isinstance(form, StructuredOutputsParams)
        assert form.disable_additional_properties is not open_


def test_a_template_error_is_short_and_valid_text(front: TestClient) -> None:
    codec = front.app.state.service.llm.inputs.codec  # type: ignore[attr-defined]
    before = codec.chat_template
    codec.chat_template = "{{ raise_exception(messages[0]['content']) }}"
    try:
        for content in ("x" * 100_000, "a\nb", "\ud800", "\0\x1b[31m"):
            text = json.dumps({"messages": [{"role": "user", "content": content}]})
            check_error(front.post(CHATS, content=text), None)
    finally:
        codec.chat_template = before


STRANGE = ["\ud800", "a\0b", "\x1b[31m", "\u2028\x85", "", " ", "\ufffe", "😀" * 50, "x" * 5000]
"""Texts that break what is careless with them."""


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize"])
def test_strange_texts_in_any_field_are_answered_in_json(front: TestClient, path: str) -> None:
    for value in STRANGE:
        function = {"name": "f", "description": value, "parameters": {value: {"const": value}}}
        fields = set(MODELS[path].model_fields) - set(refused_fields(path))
        more: list[dict[str, Any]] = [
            {name: shown} for name in sorted(fields) for shown in (value, [value])
        ]
        more += [
            {"messages": [{"role": value, "content": value}]},
            {"messages": [{**MESSAGES[0], "name": value, value: value}]},
            {"tools": [{"type": "function", "function": function}]},
            {"tools": [{"type": "function", "function": {"name": value}}]},
            {"tool_choice": {"type": "function", "function": {"name": value}}},
            {"structured_outputs": {"choice": [value]}},
            {"prediction": {"content": value}, "stream": True},
            {"speculation": {"drafter": value}},
            {"logit_bias": {value: 1}},
            {"stop": value, "stream": True},
        ]
        for change in more:
            found = front.post(path, content=json.dumps(PLAIN[path] | change))
            assert found.status_code in (200, 400, 404), (change, found.text)
            if found.headers["content-type"].startswith("application/json"):
                json.loads(found.content)


NAMES = ["type", "function", "name", "parameters", "role", "content", "text", "json_schema",
         "schema", "arguments", "tool_calls", "enabled", "drafter", "json", "a"]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([*STRANGE, *NAMES, "auto", "json_object", "user", "model", "-1", "1e999"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=12,
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, "/tokenize"])
@given(data=st.data())
@settings(
    derandomize=True, deadline=None, max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_any_value_of_any_field_is_answered(
    front: TestClient, path: str, data: st.DataObject
) -> None:
    known = sorted(MODELS[path].model_fields)
    rare = ["messages", "tools", "tool_choice", "response_format", "structured_outputs"]
    fields = st.sampled_from(known) | st.sampled_from([n for n in rare if n in known] or known)
    change = data.draw(st.dictionaries(fields, VALUES, min_size=1, max_size=3))
    start = PLAIN[path] | ({"tools": TOOLS} if path == CHATS and data.draw(st.booleans()) else {})
    depth = data.draw(st.sampled_from([0, 0, 0, 50, 200, 400]))
    for name in list(change)[:1]:
        change[name] = json.loads("[" * depth + json.dumps(change[name]) + "]" * depth)
    found = front.post(path, content=json.dumps(start | change))
    assert found.status_code in (200, 400, 404, 429), found.text
    if found.status_code != 200:
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_messages_reach_the_model_or_are_refused_here_as_offline(front: TestClient) -> None:
    inputs = front.app.state.service.llm.inputs  # type: ignore[attr-defined]
    codec = inputs.codec
    before = codec.chat_template
    codec.chat_template = (
        "{% for m in messages if m.role in ['system', 'user', 'assistant'] %}<|user|>{{ m.role }} "
        "{{ m.content }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}
    talk: list[Any] = [
        {"role": "developer", "content": "Hi"}, {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "now", "description": "The time."}}]
    try:
        for more in ({}, {"tools": tools}):
            ids = front.post("/tokenize", json={"messages": talk, **more}).json()["tokens"]
            expected = inputs.render(talk, tools=more.get("tools"))
            assert ids == codec.chat(talk, True, more.get("tools"))
            assert inputs.outputs.decode(ids) == expected
            for part in ("system Hi", "assistant <tool_call>", '"arguments": {}', "\nnoon\n"):
                assert part in expected
            assert ("The time." in expected) == bool(more)
        for role in ("function", "tool_result"):
            for path in (CHATS, "/tokenize"):
                lost = [*talk, {"role": role, "name": "now", "content": "noon"}]
                found = front.post(path, json={"messages": lost, "tools": tools})
                check_error(found, "messages")
                assert "messages[4]" in found.json()["error"]["message"]
    finally:
        codec.chat_template = before


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAME: list[list[dict[str, Any]]] = [
    [{"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
     {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": json.dumps(SCHEMA)}},
     {"json_schema": SCHEMA}, {"response_format": {"type": "json_object", "schema": SCHEMA}},
     {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
     {"response_format": {"type": "json_schema", "schema": SCHEMA}}],
    [{"guided_regex": "a+"}, {"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}],
    [{"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}],
    [{"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}},
     {"ebnf": 'start: "a"'}, {"grammar": 'start: "a"'}],
    [{"json_schema": {}}, {"response_format": {"type": "json_object"}},
     {"structured_outputs": {"json_object": True}}, {"guided_json": {"type": "object"}}],
]  # fmt: skip
"""Forms by all the names that clients give them."""


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_equal_forms_may_stand_side_by_side(model: Any) -> None:
    body = PLAIN[CHATS] | PLAIN[COMPLETIONS]
    if model is ChatRequest:
        del body["prompt"]
    else:
        del body["messages"]
    read = [model.model_validate(body | form).form() for forms in SAME for form in forms]
    assert all(read)
    for i, forms in enumerate(SAME):
        for one, two in itertools.product(forms, forms):
            assert model.model_validate(body | one | two).form()
        other = SAME[i - 1][0]
        for one in forms:
            if one.keys() != other.keys():
                with pytest.raises(Refusal, match="set different output formats; give one of them"):
                    model.model_validate(body | one | other).form()
    for nothing in (
        {"grammar": "", "ebnf": "", "regex": ""},
        {"grammar": None, "json_schema": None},
    ):
        assert model.model_validate(body | nothing).form() is None


def test_forms_of_llama_cpp_are_checked(front: TestClient) -> None:
    deep: Any = {}
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    for path in (COMPLETIONS, CHATS):
        for name, value in (("grammar", 7), ("grammar", {"a": 1}), ("json_schema", 7),
                            ("json_schema", [1]), ("json_schema", deep)):  # fmt: skip
            check_error(front.post(path, json=PLAIN[path] | {name: value}), name)
        assert front.post(path, json=PLAIN[path] | {"grammar": 'root ::= "a"'}).status_code == 200


def test_the_schema_tells_numbers_from_truth_values() -> None:
    """typing keeps one of two equal annotations, and 1 equals True."""
    fields = ChatRequest.model_json_schema()["properties"]
    wanted = {
        "length_penalty": 1, "spaces_between_special_tokens": True,
        "routed_experts_prompt_start": 0,
        "early_stopping": False,
    }  # fmt: skip
    for name, value in wanted.items():
        assert json.dumps(fields[name]["enum"]) == json.dumps([None, value]), name
