"""Tools: what may be written, and what is read of it, at every point of a stream."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from outrider import SamplingParams
from outrider.pocket import PATH
from outrider.sampling.grammar import Grammars
from outrider.server.errors import Refusal
from outrider.server.protocol import ChatRequest
from outrider.server.reader import Reader
from outrider.server.tools import choice_of, constraint, reason_of
from outrider.text.called import ToolCall
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


def read(text: str, how: str, form: Form, whole: bool) -> tuple[str, list[ToolCall]]:
    said = Reader(None, form, how, {}).read(text, whole)
    return said.content, said.calls


def body(choice: Any, **more: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "x"}]
    return ChatRequest(messages=messages, tools=TOOLS, tool_choice=choice, **more)


@pytest.mark.parametrize(("form", "choice", "text"), ALL)
def test_calls_are_read_the_same_streamed_or_whole(form: Form, choice: str, text: str) -> None:
    content, calls = read(text, choice, form, True)
    silent = form in ("llama3", "pythonic") or choice != "auto"
    assert content == ("" if silent else "Look:")
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


@pytest.mark.parametrize(("form", "choice", "text"), ALL)
def test_a_call_that_was_cut_is_no_reason_to_call(form: Form, choice: str, text: str) -> None:
    for end in range(len(text) + 1):
        calls = read(text[:end], choice, form, True)[1]
        whole = bool(calls) and all(_is_object(call.arguments) for call in calls)
        assert reason_of("stop", calls, choice) == ("tool_calls" if whole else "stop"), text[:end]
        assert reason_of("length", calls, choice) == "length"
        assert reason_of(None, calls, choice) is None
    assert whole
    assert reason_of("stop", read("{}", "=weather", form, True)[1], "=weather") == "stop"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


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
    (call,) = read('{"city": "Ro', choice.how, "hermes", False)[1]
    assert (call.name, call.arguments) == ("weather", '{"city": "Ro')
    found = constraint(choice, "hermes", ())
    assert found is not None
    assert found["json"]["properties"] == CITY["properties"]


def asked(parameters: Any, choice: str = "required", **more: Any) -> str:
    """The form's text for a tool with such parameters."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}
    messages = [{"role": "user", "content": "x"}]
    found = ChatRequest.model_validate(
        {"messages": messages, "tools": [tool], "tool_choice": choice}
    )
    made = constraint(choice_of(found), "hermes", ())
    assert made is not None
    return str(made["grammar"])


def arguments_fit(parameters: Any, arguments: str, **more: Any) -> bool:
    tokenizer = Tokenizer.from_file(str(Path(PATH) / "tokenizer.json"))
    grammars = Grammars(lambda: tokenizer, tokenizer.get_vocab_size(), frozenset([0]))
    params = SamplingParams(structured_outputs={"grammar": asked(parameters, **more)})
    grammar = grammars.compile(params)
    assert grammar is not None
    text = f'[{{"name": "f", "arguments": {arguments}}}]'
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return grammar.accepts(ids) == len(ids)


@pytest.mark.parametrize(
    "parameters",
    [
        None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": {}},
        {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
        {"title": "Nothing", "description": "none", "properties": None, "$defs": {"A": CITY}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("strict", [None, True, False])
def test_a_tool_without_parameters_has_none(parameters: Any, strict: bool | None) -> None:
    assert arguments_fit(parameters, "{}", strict=strict)
    assert not arguments_fit(parameters, '{"a": 1}', strict=strict)


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_tools_have_the_keys_that_they_name() -> None:
    for strict in (None, True):
        assert arguments_fit(OPEN, '{"a": 1}', strict=strict)
        assert not arguments_fit(OPEN, '{"a": 1, "c": 2}', strict=strict)
    assert arguments_fit(OPEN, '{"a": 1, "c": 2}', strict=False)
    assert not arguments_fit(OPEN, '{"a": "x"}', strict=False)
    for anything in (True, {}, {"type": "integer"}):
        assert arguments_fit({"type": "object", "additionalProperties": anything}, '{"c": 2}')
    assert not arguments_fit({"properties": {"a": {}}}, "[1]")  # arguments are an object


def marked(special: bool) -> Tokenizer:
    """A tokenizer whose <tool_call>, <think> and </tool_call> are tokens."""
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
    tokenizer = Tokenizer(
        models.BPE({c: i + 1 for i, c in enumerate(letters)} | {"<|end|>": 0}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    own = [AddedToken(t, special=special) for t in ("<think>", "<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(
        [*own, AddedToken("<|end|>", special=True), AddedToken("[INST]", special=True)]
    )
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_free_text_has_every_token_of_the_model(form: Form, special: bool) -> None:
    tokenizer = marked(special)
    added = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    others = [id for token, id in added.items() if id and "tool_call" not in token]
    found = constraint(choice_of(body("auto")), form, added, others)
    size = tokenizer.get_vocab_size()
    grammar = Grammars(lambda: tokenizer, size, frozenset([0])).compile(
        SamplingParams(structured_outputs=found)
    )
    assert grammar is not None
    written = f"<think>so {{}}[INST]\n</tool_call>, <think>{ROME if form == 'hermes' else ''}"
    ids = tokenizer.encode(written, add_special_tokens=False).ids
    allowed = [id for id in ids if not (special and id == tokenizer.token_to_id("</tool_call>"))]
    assert grammar.accepts(allowed) == len(allowed)
    if form == "hermes":
        call = tokenizer.encode(f"<tool_call>\n{ROME}\n</tool_call>", add_special_tokens=False).ids
        assert tokenizer.token_to_id("<tool_call>") == call[0]
        begun = [*allowed, call[0], tokenizer.token_to_id("h")]
        assert grammar.accepts(begun) == len(begun) - 1
        assert grammar.accepts([*allowed, *call, *call, ids[0]]) == len(allowed) + 2 * len(call) + 1
        spelled = [tokenizer.token_to_id(c) for c in "<tool_call>"]
        assert grammar.accepts([*spelled, *call[1:]]) == len(spelled) + len(call) - 1
        assert grammar.accepts([*spelled, tokenizer.token_to_id("h")]) == len(spelled)
    else:
        brace, letter = map(tokenizer.token_to_id, "{x")
        assert grammar.accepts([brace, letter]) == 1  # a text may not look like a call
        assert not special or grammar.accepts([ids[0], brace]) == 1
    (mask,) = grammar.masks([[]])
    assert isinstance(mask, np.ndarray)
    kept = {i for i in range(size) if mask[i // 8] >> i % 8 & 1}
    missing = {tokenizer.id_to_token(i) for i in set(range(size)) - kept}
    assert missing <= {"</tool_call>", "<tool_call>" if form == "llama3" else ""}


def matcher(form: Form, how: str, several: bool = True) -> tuple[LLMatcher, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(Path(PATH) / "tokenizer.json"))
    found = constraint(choice_of(body(how)), form, (), several=several)
    assert found is not None
    known = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=[0])
    made = LLMatcher(known, grammar_from("grammar", found["grammar"]), log_level=0)
    assert not made.is_error(), made.get_error()
    return made, tokenizer


GOOD = [
    *ALL, ("hermes", "auto", "no call {at} all <b>"), ("llama3", "auto", "no call {at} all <b>"),
    ("hermes", "auto", ""), ("llama3", "auto", ""), ("hermes", "auto", f"{HERMES} and so on"),
    ("hermes", "auto", '<tool_call>{"name":"time","arguments":{}}</tool_call>'),
    ("hermes", "auto", '<tool_call>\n{\n  "name": "time",\n  "arguments": { }\n}\n</tool_call>'),
]  # fmt: skip
WRONG: list[tuple[Form, str, str]] = [
    ("hermes", "auto", '<tool_call>{"name": "rain"'),
    ("hermes", "auto", '<tool_call>{"name":"time","arguments":{"any":[1, 2]}}</tool_call>'),
    ("hermes", "auto", '<tool_call>   {"name":"time","arguments":{}}</tool_call>'),
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
    made, tokenizer = matcher(form, choice, several=False)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert made.try_consume_tokens(ids) < len(ids)


def test_the_form_follows_the_template() -> None:
    assert form_of("... <|python_tag|> ...") == "llama3"
    assert form_of("... <tool_call> ...") == form_of(None) == "hermes"
    assert form_of("<tool_call>\n<function=name>") == "qwen3_coder"
    assert form_of("[TOOL_CALLS]") == "mistral"
    assert form_of("<|tool_call|>") == "granite"
    assert form_of("<|tool_call_start|>[") == "lfm2"
    assert form_of("<|start|>assistant<|channel|>final") == "openai"


def test_some_tools_may_be_allowed() -> None:
    named = [{"type": "function", "function": {"name": "time"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    choice = choice_of(body(allowed))
    assert choice.how == "required"
    assert [tool.function.name for tool in choice.allowed] == ["time"]
    found = constraint(choice, "hermes", ())
    assert found is not None
    assert "weather" not in found["grammar"]
    allowed["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "rain"}}]  # type: ignore[index]
    with pytest.raises(Refusal, match="names 'rain', which is not among tools"):
        choice_of(body(allowed))


OTHERS: list[tuple[Form, str]] = [
    ("mistral", f"Look: [TOOL_CALLS] [{ROME}, {OSLO}]"),
    ("mistral", 'Look: [TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]weather[CALL_ID]a1B'
     '[ARGS]{"city": "Oslo {\\"}"}'),
    ("mistral", 'Look: [TOOL_CALLS]weather{"city": "Rome"}'
     '[TOOL_CALLS]weather{"city": "Oslo {\\"}"}'),
    ("mistral", 'Look: [TOOL_CALLS]weather[CALL_ID]a1B[ARGS]{"city": "Rome"}'
     '[TOOL_CALLS]weather[ARGS]{"city": "Oslo {\\"}"}'),
    ("granite", f"Look: <|tool_call|>[{ROME}, {OSLO}]"),
    ("llama3", f"[{ROME}, {OSLO}]"),
    ("qwen3_coder", "Look: <tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
     "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo {\"}\n"
     "</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", HERMES),
    ("lfm2", 'Look: <|tool_call_start|>[weather(city="Rome"), weather(city="Oslo {\\"}")]'
     "<|tool_call_end|>"),
    ("pythonic", '[weather(city="Rome"), weather(city="Oslo {\\"}")]'),
    ("pythonic", '<|python_start|>[weather(city="Rome"), weather(city="Oslo {\\"}")]'
     "<|python_end|>"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), OTHERS)
def test_other_forms_are_read_the_same_streamed_or_whole(form: Form, text: str) -> None:
    test_calls_are_read_the_same_streamed_or_whole(form, "auto", text)


def test_values_have_the_types_of_their_schemas() -> None:
    types = {"f": {"n": {"type": "integer"}, "s": {"type": "string"}, "l": {}}}
    parts = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in (("n", "7"), ("s", "7"), ("l", "[1]"), ("x", "a b"))
    )
    reader = Reader(None, "qwen3_coder", "auto", types)
    (call,) = reader.read(f"<tool_call>\n<function=f>\n{parts}</function>\n", False).calls
    assert json.loads(call.arguments) == {"n": 7, "s": "7", "l": [1], "x": "a b"}


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[f(1)]", "[f(**x)]", "[f(a=g())]", "[f(a=1", "[" * 5000, "x [f(a=1)]"]
)
def test_other_python_is_no_call(text: str) -> None:
    assert read(text, "auto", "pythonic", True) == (text, [])


def test_a_template_sees_all_that_a_tool_says() -> None:
    tool = {
        "type": "function",
        "defer": True,
        "function": {"name": "f", "strict": True, "parameters": {"type": "object"}},
    }
    messages = [{"role": "user", "content": "x"}]
    asked = ChatRequest.model_validate({"messages": messages, "tools": [tool]})
    assert [given.model_dump(exclude_none=True) for given in asked.tools or []] == [tool]


BARE = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize("before", ["", "\n ", "```json\n", "```json \n\n", "```\n"])
@pytest.mark.parametrize("behind", ["", "\n```", f"\n{BARE}", ' and {"so": "on"}'])
def test_calls_without_their_marks(before: str, behind: str) -> None:
    """Small models forget the marks; a call of a known tool is one all the same."""
    reader, text = Reader(None, "hermes", "auto", {"weather": {}}), before + BARE + behind
    count = 0
    for end in range(len(text) + 1):
        said = reader.read(text[:end], False)
        assert not said.content
        assert len(said.calls) >= count
        count = len(said.calls)
    whole = reader.read(text, True)
    assert whole.content == ""
    assert [(c.name, json.loads(c.arguments)) for c in whole.calls] == [
        ("weather", {"city": "Rome"})
    ] * (1 + (BARE in behind))
    assert len(whole.calls) == count


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "rain", "arguments": {}}', '{"name": "weather"}', '{"city": "Rome"}', "{", "{}",
        '```json\n{"name": "weather", "age": 3}\n```', "```python\nprint({})\n```", "x ```", "``",
        'x {"name": "weather", "arguments": {}}', '{"name": "weather", "arguments"',
        f"Use it so:\n```json\n{BARE}\n```\nand then done.", '{"name": "weather", "arguments": 3}',
        '```json\n{"a": 1}\n```\nand\n```json\n[1]\n```', "<tool_cal",
    ],
)  # fmt: skip
def test_other_json_stays_text(text: str) -> None:
    reader, shown = Reader(None, "hermes", "auto", {"weather": {}}), ""
    for end in range(len(text) + 1):
        said = reader.read(text[:end], False)
        assert said.content.startswith(shown)
        assert not said.calls
        shown = said.content
    said = reader.read(text, True)
    assert (said.content, said.calls) == (text, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "The <tool_call> tag opens a call."), ("hermes", "<tool_call>no</tool_call> x"),
        ("hermes", '<tool_call>{"city": 1}</tool_call> x'), ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name":"f","arguments":3}</tool_call> x'),
        ("granite", "<|tool_call|>[]"), ("granite", "<|tool_call|>[1]"),
        ("mistral", "[TOOL_CALLS] oops"), ("mistral", "[TOOL_CALLS]"),
        ("qwen3_coder", "<tool_call>\n<funny>"), ("lfm2", "<|tool_call_start|>no<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"), ("llama3", '{"city": "Rome"}'),
        ("llama3", f"; {ROME}"), ("mistral", f"[TOOL_CALLS],{ROME}"),
        ("qwen3_coder", "<tool_call>,{}"), ("hermes", f"{'<tool_call>' * 99}{ROME}"),
        ("llama3", "{}"), ("pythonic", "[1] and so on"), ("pythonic", "[f(a=1e999)]"),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(form: Form, text: str) -> None:
    shown = ""
    for end in range(len(text) + 1):
        content, calls = read(text[:end], "auto", form, False)
        assert content.startswith(shown)
        assert not calls
        shown = content
    assert read(text, "auto", form, True) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"arguments":{"a": 1},"name":"f"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name":"f"}</tool_call>', {}),
        ("mistral", '[TOOL_CALLS] [{"arguments":{"a": 1},"name":"f"}]', {"a": 1}),
        ("lfm2", '<|tool_call_start|>{"name":"f","arguments":{"a": 1}}<|tool_call_end|>', {"a": 1}),
        ("lfm2", '<|tool_call_start|>[f(a="<|tool_call_end|>")]<|tool_call_end|>',
         {"a": "<|tool_call_end|>"}),
        ("pythonic", '[f(a="\\ud800")] and more', {"a": "\ud800"}),
        ("pythonic", "[f(a=']', b=[(1, 2)])]", {"a": "]", "b": [[1, 2]]}),
        ("qwen3_coder", "<tool_call><function=f>\n<parameter=a>NaN</parameter></function>",
         {"a": "NaN"}),
    ],
)  # fmt: skip
def test_other_ways_to_write_arguments(form: Form, text: str, arguments: Any) -> None:
    for end in range(len(text) + 1):
        content, calls = read(text[:end], "auto", form, False)
        assert not content
        assert len(calls) <= 1
    (call,) = read(text, "auto", form, True)[1]
    assert call.name == "f"
    assert call.arguments.isascii()
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("before", ["<tool_call>", "<tool_call>\n</tool_call>"])
def test_a_mark_without_a_call_before_a_call(before: str) -> None:
    text, shown = f"{before}\n<tool_call>{ROME}</tool_call>", ""
    for end in range(len(text) + 1):
        content, _ = read(text[:end], "auto", "hermes", False)
        assert content.startswith(shown)
        shown = content
    content, calls = read(text, "auto", "hermes", True)
    assert (content, len(calls)) == (shown, 1) == (before, 1)


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("qwen3_coder", "<tool_call><function=f>"), ("qwen3_coder", "<tool_call><function="),
        ("qwen3_coder", "<function=f><parameter=a>"), ("hermes", "<tool_call>{"),
        ("mistral", "[TOOL_CALLS]{"), ("mistral", "[TOOL_CALLS]f"), ("granite", "<|tool_call|>["),
        ("lfm2", "<|tool_call_start|>[f("),
        ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>"),
    ],
)  # fmt: skip
def test_a_part_without_end_is_read_in_little_time(form: Form, part: str) -> None:
    text = "<tool_call>" * (form == "qwen3_coder") + part * 3000
    for whole in (False, True):
        begin = time.process_time()
        Reader(None, form, "auto", {"f": {}}).read(text, whole)
        assert time.process_time() - begin < 2


def test_long_outputs_are_read_in_little_time() -> None:
    """As often as there are steps: what is no call may hold many beginnings of calls."""
    blocks = '```\n{"name":"zz","arguments":{}}\n' * 4000
    for text in (f"x{blocks}", "```\n" + "\n" * 100_000, "<tool_call>" * 5_000, "{" * 100_000):
        begin = time.process_time()
        Reader(None, "hermes", "auto", {"zz": {}}).read(text, False)
        assert time.process_time() - begin < 1
