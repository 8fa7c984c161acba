"""Tools: what may be written, and what is read of it, at every point of a stream."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import Tokenizer

from outrider.pocket import PATH
from outrider.server.protocol import ChatRequest
from outrider.server.tools import choice_of, constraint, read
from outrider.text.calls import Form, form_of

CITY = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
    "additionalProperties": False, "$defs": {"City": {"enum": ["Rome", "Oslo {\"}"]}},
}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
OSLO = '{"name":"weather","arguments":{"city":"Oslo {\\"}"}}'
HERMES = f"Look: <tool_call>\n{ROME}\n</tool_call>\n<tool_call>{OSLO}</tool_call>"
LLAMA = f"{ROME}; {OSLO}".replace("arguments", "parameters")
ALL: list[tuple[Form, str, str]] = [
    ("hermes", "auto", HERMES), ("llama3", "auto", LLAMA),
    ("hermes", "required", f"[{ROME},{OSLO}]"),
]  # fmt: skip


def body(choice: Any, **more: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "x"}]
    return ChatRequest(messages=messages, tools=TOOLS, tool_choice=choice, **more)


@pytest.mark.parametrize(("form", "choice", "text"), ALL)
def test_calls_are_read_the_same_streamed_or_whole(form: Form, choice: str, text: str) -> None:
    content, calls = read(text, choice, form, True)
    assert content == ("Look:" if form == "hermes" and choice == "auto" else "")
    assert [(c.name, json.loads(c.arguments)["city"]) for c in calls] == [
        ("weather", "Rome"), ("weather", 'Oslo {"}'),
    ]  # fmt: skip
    shown: str = ""
    told: list[str] = []
    for end in range(len(text) + 1):
        so_far, begun = read(text[:end], choice, form, False)
        assert so_far.startswith(shown)
        shown = so_far
        for i, call in enumerate(begun):
            assert call.arguments.startswith(told[i] if i < len(told) else "")
        told = [call.arguments for call in begun]
    assert shown == content
    assert told == [call.arguments for call in calls]


@pytest.mark.parametrize("text", ["plain", "a < b", "tail <tool_ca", " {x}", "<|python", ""])
@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_text_that_is_no_call_stays_text(text: str, form: Form) -> None:
    if form == "llama3" and text == " {x}":
        text = "x {x}"
    assert read(text, "auto", form, True) == (text, [])
    assert text.startswith(read(text, "auto", form, False)[0])
    assert read(HERMES, "none", form, True) == (HERMES, [])


def test_a_named_tool_is_all_arguments() -> None:
    choice = choice_of(body({"type": "function", "function": {"name": "weather"}}))
    (call,) = read('{"city": "Ro', choice, "hermes", False)[1]
    assert (call.name, call.arguments) == ("weather", '{"city": "Ro')
    found = constraint(body("auto"), choice, "hermes", ())
    assert found is not None
    assert found["json"]["properties"] == CITY["properties"]


def matcher(form: Form, choice: str, **more: Any) -> tuple[LLMatcher, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(Path(PATH) / "tokenizer.json"))
    found = constraint(body(choice, **more), choice, form, ())
    assert found is not None
    known = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[0])
    made = LLMatcher(known, grammar_from("grammar", found["grammar"]), log_level=0)
    assert not made.is_error(), made.get_error()
    return made, tokenizer


GOOD = [
    *ALL, ("hermes", "auto", "no call {at} all <b>"), ("llama3", "auto", "no call {at} all <b>"),
    ("hermes", "auto", ""), ("llama3", "auto", ""), ("hermes", "auto", f"{HERMES} and so on"),
    ("hermes", "auto", '<tool_call>{"name":"time","arguments":{"any":[1, 2]}}</tool_call>'),
]  # fmt: skip
WRONG: list[tuple[Form, str, str]] = [
    ("hermes", "auto", '<tool_call>{"name": "rain"'),
    ("hermes", "auto", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"'),
    ("hermes", "auto", "<tool_call> hello"),
    ("hermes", "auto", ROME.join(("<tool_call>", "</tool_ca"))),
    ("llama3", "auto", '{"name": "weather", "arguments"'),
    ("llama3", "auto", f"{LLAMA} and so on"), ("hermes", "required", "[]"),
    ("hermes", "required", "Look"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "choice", "text"), GOOD)
def test_calls_may_be_written(form: Form, choice: str, text: str) -> None:
    made, tokenizer = matcher(form, choice)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert made.try_consume_tokens(ids) == len(ids)
    assert made.is_accepting()


@pytest.mark.parametrize(("form", "choice", "text"), WRONG)
def test_nothing_else_may(form: Form, choice: str, text: str) -> None:
    made, tokenizer = matcher(form, choice)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert made.try_consume_tokens(ids) < len(ids) or not made.is_accepting()


@pytest.mark.parametrize(("form", "choice", "text"), ALL)
def test_one_call_where_no_more_are_wanted(form: Form, choice: str, text: str) -> None:
    made, tokenizer = matcher(form, choice, parallel_tool_calls=False)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert made.try_consume_tokens(ids) < len(ids)


def test_the_form_follows_the_template() -> None:
    assert form_of("... <|python_tag|> ...") == "llama3"
    assert form_of("... <tool_call> ...") == form_of(None) == "hermes"


def test_a_template_sees_all_that_a_tool_says() -> None:
    tool = {
        "type": "function",
        "defer": True,
        "function": {"name": "f", "strict": True, "parameters": {"type": "object"}},
    }
    messages = [{"role": "user", "content": "x"}]
    asked = ChatRequest.model_validate({"messages": messages, "tools": [tool]})
    assert [given.model_dump(exclude_none=True) for given in asked.tools or []] == [tool]
