"""Chat templates: the text that transformers makes, within a budget, and errors in a sentence."""

from __future__ import annotations

import json
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from outrider.checkpoints.tokenizers import read_codec
from outrider.errors import RequestError
from outrider.text.called import read_auto
from outrider.text.codec import TextCodec
from outrider.text.template import LONGEST_TEXT, STEPS, render
from tests.support.tiny import save_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": "What is 1 + 1? <b>&amp;</b>"},
    {"role": "assistant", "content": None, "reasoning": "adding", "tool_calls": [
        {"function": {"name": "add", "arguments": {"a": 1, "b": [1, "ä"]}}}]},
    {"role": "tool", "content": "2"},
    {"role": "user", "content": "  Thanks!  "},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
# The constructs that templates of well-known models use.
TEMPLATES = {
    "loops": (
        "{%- for m in messages %}{{ '<|' + m.role + '|>' }}{{ loop.index0 }}/{{ loop.length }}\n"
        "{%- if not loop.last %},{% endif %}{% if loop.first %}!{% endif %}"
        "{{ m['content'] | trim if m.content else 'none' }}"
        "{{ loop.previtem.role if loop.previtem is defined }}{% endfor %}"
    ),
    "tools": (
        "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=4) }}{% for t in tools %}"
        "{{ t.function | tojson }}{% endfor %}{% endif %}{% for m in messages if m.tool_calls %}"
        "{% for c in m.tool_calls %}{{ c.function.name ~ '(' ~ (c.function.arguments | tojson) "
        "~ ')' }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
        "{{ m.reasoning_content }}{{ m.thinking }}{% else %}no calls{% endfor %}{{ eos_token }}"
    ),
    "namespaces": (
        "{% set ns = namespace(n=0, text='') %}{% for m in messages[::-1] %}"
        "{% set ns.n = ns.n + m.role | length * 2 %}{% set ns.text = ns.text + m.role[:2] %}"
        "{% if m.role == 'system' %}{% break %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.text }}"
        "{{ 'x' * 3 }}{{ 2 ** 5 }}{{ '%s-%03d' % ('a', 7) }}{{ '{:>5}'.format('b') }}"
    ),
    "macros": (
        "{% macro say(m, deep=2) %}[{{ m.role }}{% if deep %}{{ say(m, deep - 1) }}{% endif %}]"
        "{% endmacro %}{% for m in messages %}{{ say(m) }}{% generation %}{{ m.role | upper }}"
        "{% endgeneration %}{% endfor %}{{ range(3) | list }}{{ dict(a=1) }}"
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', "
        "'equalto', 'user') | list | length }}{{ 'a,b'.split(',') }}{{ '  a b'.strip() | title }}"
        "{% set block %}inner {{ 1 }}{% endset %}{{ block }}{{ 'abc' | replace('b', 'xx') }}"
    ),
    "conditions": (
        "{%- set last = messages[-1] %}{%- if add_generation_prompt is defined and "
        "add_generation_prompt %}<|go|>{%- endif %}\n    {%- if documents is none %}none{% endif %}"
        "{{ enable_thinking | default(true) }}{{ last.content is string }}{{ unknown }}"
        "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
        "{% for c in 'ab' %}{{ loop.cycle('x', 'y') }}{{ c }}{% endfor %}"
        "{% for n in missing %}{{ n }}{% else %}nothing{% endfor %}"
    ),
}


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, "{{ messages }}")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return read_codec(folder)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
def test_the_text_is_transformers(name: str, prompted: bool, codec: TextCodec) -> None:
    theirs = AutoTokenizer.from_pretrained(codec.source)
    theirs.chat_template = TEMPLATES[name]
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(
            MESSAGES, tools=tools, add_generation_prompt=prompted, tokenize=False
        )
        variables = {"documents": None, **theirs.special_tokens_map, "tools": tools}
        text = render(TEMPLATES[name], MESSAGES, **variables, add_generation_prompt=prompted)
        assert text == expected


@pytest.mark.parametrize("content", ["It is", "It is  ", [{"type": "text", "text": "It is"}]])
def test_a_last_message_is_continued_as_transformers_does(content: Any, codec: TextCodec) -> None:
    theirs = AutoTokenizer.from_pretrained(codec.source)
    theirs.chat_template = codec.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}"
        "{% else %}{{ m.content[0].text }}{% endif %}</>{% endfor %}"
    )
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(talk, continue_final_message=True, tokenize=False)
    ids = theirs(expected, add_special_tokens=False)["input_ids"]
    assert codec.chat(talk, False, continue_final_message=True) == ids
    assert talk[-1]["content"] == content


FEWER_STEPS = STEPS // 10
"""The budget of what would use it up: a tenth of the steps, in a tenth of the time."""
TOO_LONG = f"more than {FEWER_STEPS} steps"
BOMBS = {
    "{{ lipsum(99999) }}": "'lipsum' is undefined",
    "{{ 1 / 0 }}": "division by zero",
    "{{ 'a' * 10**11 }}": f"more than {LONGEST_TEXT} characters",
    "{{ [[1] * 9999] * 9999 }}": f"more than {LONGEST_TEXT} characters",
    "{{ ['a' * 9999999] * 99 }}": f"more than {LONGEST_TEXT} characters",
    **dict.fromkeys(
        [
            "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = "
            + each
            + " %}{% endfor %}"
            for each in (
                "[ns.x, ns.x]",
                "(ns.x, ns.x)",
                "{'a': ns.x, 'b': ns.x}",
                "dict(a=ns.x, b=ns.x)",
                "namespace(a=ns.x, b=ns.x)",
                "[ns.x] * 2",
            )
        ],
        f"more than ({LONGEST_TEXT} characters|{FEWER_STEPS} steps)",
    ),
    "{% set ns = namespace(x=[]) %}{% macro f() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ f(ns.x, ns.x, 1) }}{% endfor %}": "more than",
    "{% set a = range(90000) | list %}{% set b = range(90000) | list %}"
    "{% for i in range(9999) %}{% if a == b %}{% endif %}{% endfor %}": TOO_LONG,
    "{% set a = 'a' * 9999999 %}{% for i in range(9999) %}{% if 'b' in a %}{% endif %}{% endfor "
    "%}": TOO_LONG,
    "{% set a = 'a' * 9999999 %}{% for i in range(9999) %}{% if 'b' is in a %}{% endif %}{% endfor "
    "%}": TOO_LONG,
    "{{ ([[1]] * 99999) | sum(start=[]) | length }}": TOO_LONG,
    "{{ [0] * 10**9 }}": f"more than {LONGEST_TEXT} characters",
    "{{ 10 ** 1000000000 }}": "power above 256",
    "{{ '%1000000000d' % 1 }}": "too large a width",
    "{{ '%*d' % (1000000000, 1) }}": "too large a width",
    "{{ '{:1000000000}'.format(1) }}": "too large a width",
    "{{ '%1000000000d' | format(1) }}": "too large a width",
    "{{ 'a'.ljust(1000000000) }}": "ljust with a number above",
    "{{ 'a' | center(1000000000) }}": "center with a number above",
    "{{ [1] | tojson(indent=1000000000) }}": "tojson with a number above",
    "{{ [1] | batch(1000000000, 0) | list }}": "batch with a number above",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% set c = 1 %}{% endfor %}"
    "{% endfor %}": TOO_LONG,
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nest too deeply",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}": (
        TOO_LONG
    ),
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}": f"more than {LONGEST_TEXT} characters",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}": f"more than {LONGEST_TEXT} characters",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', ns.x)"
    " %}{% endfor %}": f"more than {LONGEST_TEXT} characters",
    "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.join([ns.x] * 9) "
    "%}{% endfor %}": f"more than {LONGEST_TEXT} characters",
    "{% set x = 'a' * 9999999 %}{% for i in range(9999) %}{{ x }}{% endfor %}": "more than",
    "{% set x = 'a' * 9999999 %}{% set y %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endset "
    "%}": "more than",
    "{{ ().__class__.__bases__ }}": "unsafe",
    "{{ messages[9].role }}": "no element 9",
    "{{ raise_exception('no') }}": "no",
    "{% for %}": "Expected an expression",
    "{{ range(10**9) | list }}": "Range too big",
    "{{ 'a' | nofilter }}": "nofilter",
    "{{ strftime_now(1) }}": "strftime",
}


@pytest.mark.parametrize("template", BOMBS)
def test_what_a_template_does_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if f"{FEWER_STEPS} steps" in BOMBS[template]:
        monkeypatch.setattr("outrider.text.template.STEPS", FEWER_STEPS)
    started = time.thread_time()
    with pytest.raises(RequestError, match=BOMBS[template]) as error:
        render(template, [{"role": "user", "content": "hi"}])
    assert time.thread_time() - started < 3
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_the_budget_holds_in_a_thread_and_starts_afresh(codec: TextCodec) -> None:
    loop = "{% for a in range(1000) %}{% for b in range(550) %}{% endfor %}{% endfor %}"
    found: list[str] = []

    def run() -> None:
        for template in (loop, loop, loop + loop):
            try:
                found.append(render(template, []))
            except RequestError as error:
                found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[:2] == ["", ""]
    assert f"more than {STEPS} steps" in found[2]


def test_long_conversations_stay_within_the_budget() -> None:
    talk = [{"role": "user", "content": "word " * 200}] * 4096  # 4 MB
    for template in TEMPLATES.values():
        render(template, talk, tools=None, documents=None)


@pytest.mark.parametrize("template", [{"a": "x"}, {"default": 3}, 7])
def test_a_template_that_is_none_is_refused(template: Any, codec: TextCodec) -> None:
    codec.chat_template = template
    with pytest.raises(RequestError):
        codec.chat([{"role": "user", "content": "hi"}])


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Prints the roles it knows and passes over others, as Qwen2.5's.
CHOOSY = CHATML.replace(" in messages %}", " in messages if m.role in ['system', 'user'] %}")
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] or "
    "(m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}"
)
# Prints tools, one call a turn, no text beside it, and results as JSON, as Llama 3.1's.
ONE_CALL = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{{ m.tool_calls[0].function | tojson }}{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "it is 2", "tool_call_id": "1"},
]


def said(codec: TextCodec, template: Any, messages: list[Any], **more: Any) -> str:
    codec.chat_template = template
    return codec.render(messages, **more)


@pytest.mark.parametrize("content", ["Be brief.", "a", "user"])
def test_a_developer_is_the_system_where_the_template_knows_none(
    content: str, codec: TextCodec
) -> None:
    asked = [{"role": "developer", "content": content}, {"role": "user", "content": "Hi"}]
    knows = CHOOSY.replace("'system'", "'developer'")
    refuses = CHOOSY.replace("{% for", "{{ raise_exception('no') if messages[0].role not in "
                             "['system', 'user'] }}{% for")  # fmt: skip
    for template in (CHATML, CHOOSY, refuses):
        assert said(codec, template, asked).startswith(f"<|system|>{content}<|end|><|user|>Hi")
    assert said(codec, knows, asked).startswith(f"<|developer|>{content}<|end|><|user|>Hi")


@pytest.mark.parametrize("role", ["function", "critic", "assistant", "tool_result", "User"])
@pytest.mark.parametrize("content", ["42", "Hi", "a", "user", [{"type": "text", "text": "Hi"}]])
def test_a_message_that_does_not_come_out_is_named(
    role: str, content: Any, codec: TextCodec
) -> None:
    asked = [{"role": "user", "content": "Hi"}, {"role": role, "content": content}]
    with pytest.raises(RequestError, match=rf"leaves out messages\[1\] \(role '{role}'\)") as error:
        said(codec, CHOOSY, asked)
    assert error.value.param == "messages"
    assert f"<|{role}|>" in said(codec, CHATML, asked)
    asked[1]["content"] = " \n"  # nothing to lose
    assert said(codec, CHOOSY, asked) == "<|user|>Hi<|end|><|assistant|>"


def test_what_a_template_changes_is_not_lost(codec: TextCodec) -> None:
    thoughts = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1].strip() | upper "
        "if m.role == 'assistant' else m.content | trim | tojson }}{% endfor %}"
    )
    talk = [
        {"role": "user", "content": '  "Why"?\n'},
        {"role": "assistant", "content": "<think>Because.</think>"},
        {"role": "user", "content": "zqx1xqz"},
    ]
    text = '<|user|>"\\"Why\\"?"<|assistant|><|user|>"zqx1xqz"'
    assert said(codec, thoughts.replace(" | upper", ""), talk) == text


def test_tools_reach_a_model_whose_template_reads_none(codec: TextCodec) -> None:
    system = [{"role": "system", "content": "Be brief."}]
    for asked in (CALLED, system + CALLED):
        text = said(codec, CHATML, asked, tools=TOOLS)
        start, _, rest = text.partition("<|end|><|user|>Add.")
        assert start.startswith(
            "<|system|>Be brief.\n\nYou can" if asked != CALLED else "<|system|>You"
        )
        assert json.dumps(TOOLS[0]) in start
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        result = "<tool_response>\nit is 2\n</tool_response>"
        assert rest == f"<|end|><|assistant|>{call}<|end|><|user|>{result}<|end|><|assistant|>"
        example = start[start.index("<tool_call>") :]
        for written in (example, rest):
            ((name, arguments),) = [
                (c.name, json.loads(c.arguments)) for c in read_auto(written, "hermes", True)[1]
            ]
            assert (name, arguments) in (("NAME", {"PARAMETER": "VALUE"}), ("add", {"a": 1}))


def test_tools_reach_a_model_without_a_system(codec: TextCodec) -> None:
    more = [*CALLED, CALLED[2], {"role": "user", "content": "And?"}]
    text = said(codec, STRICT, more, tools=TOOLS)
    assert text.startswith("<|user|>You can call functions")
    assert json.dumps(TOOLS[0]) in text.partition("\n\nAdd.<|assistant|>")[0]
    result = "<tool_response>\nit is 2\n</tool_response>"
    assert text.endswith(f"<|user|>{result}\n{result}\nAnd?")
    assert said(codec, STRICT, more).startswith("<|user|>Add.<|assistant|><tool_call>\n")
    with pytest.raises(RequestError, match="roles must alternate"):
        said(codec, STRICT, [{"role": "system", "content": "x"}, *more], tools=TOOLS)


def test_calls_alone_are_written_where_only_they_are_lost(codec: TextCodec) -> None:
    assert '{"name": "add", "arguments": {"a": 1}}' in said(codec, ONE_CALL, CALLED, tools=TOOLS)
    talk = [dict(message) for message in CALLED]
    for change in ({"tool_calls": [CALL, CALL]}, {"content": "I add."}):
        talk[1] = CALLED[1] | change
        text = said(codec, ONE_CALL, talk, tools=TOOLS)
        assert text.startswith(json.dumps(TOOLS))
        assert text.count("<tool_call>") == len(talk[1]["tool_calls"])
        assert ("I add.\n<tool_call>" in text) == ("content" in change)
        assert text.endswith('<|tool|>"it is 2"')


def test_calls_take_the_form_that_the_server_reads(codec: TextCodec) -> None:
    codec.set_form = "llama3"
    try:
        text = said(codec, CHATML, CALLED, tools=TOOLS)
    finally:
        codec.set_form = None
    written = '{"name": "add", "parameters": {"a": 1}}'
    assert f"<|assistant|>{written}<|end|>" in text
    assert "<tool_call>" not in text
    assert [c.name for c in read_auto(written, "llama3", True)[1]] == ["add"]


@pytest.mark.parametrize("arguments", ["", " \n", None, "null", " null ", {}, "{}", "missing"])
def test_arguments_that_are_none_are_an_empty_object(arguments: Any, codec: TextCodec) -> None:
    function: dict[str, Any] = {"name": "now", "arguments": arguments}
    if arguments == "missing":
        del function["arguments"]
    talk = [CALLED[0], {"role": "assistant", "tool_calls": [{"function": function}]}]
    assert '{"name": "now", "arguments": {}}' in said(codec, ONE_CALL, talk)
    assert '{"name": "now", "arguments": {}}' in said(codec, CHATML, talk)


def test_a_refusal_and_parts_of_a_text_are_contents(codec: TextCodec) -> None:
    parts = [
        {"type": "output_text", "text": "a"},
        {"type": "refusal", "refusal": "b"},
        {"type": "input_text", "text": "c"},
    ]
    talk = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "refusal": "I will not.", "tool_calls": []},
    ]
    text = "<|user|>a\nb\nc<|end|><|assistant|>I will not.<|end|>"
    assert said(codec, CHATML, talk, add_generation_prompt=False) == text


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("x", r"messages\[0\].tool_calls is 'x'; give a list"),
        ([{"type": "custom", "custom": {"name": "f"}}], r"messages\[0\].tool_calls\[0\] has no"),
        ([CALL, {"function": {"arguments": "{}"}}], r"messages\[0\].tool_calls\[1\] has no"),
        ([3], r"messages\[0\].tool_calls\[0\] has no"),
    ],
)
def test_calls_that_are_none_are_refused(calls: Any, reason: str, codec: TextCodec) -> None:
    with pytest.raises(RequestError, match=reason):
        said(codec, CHATML, [{"role": "assistant", "tool_calls": calls}])


def test_deep_arguments_are_refused_or_text(codec: TextCodec) -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for arguments in ({"a": deep}, "[" * 200_000, '{"a": ' * 30_000, "[1e999]", "9" * 5000):
        function = {"name": "f", "arguments": arguments}
        with suppress(RequestError):
            said(codec, CHATML, [{"role": "assistant", "tool_calls": [{"function": function}]}])


def test_named_templates_are_used(tmp_path: Path) -> None:
    """Of a list in the config, and of a folder beside the template."""
    tool_use = "TOOLS " + ONE_CALL
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_tokenizer(tmp_path, CHATML)
    names = {"default": CHATML, "tool_use": tool_use, "rag": "RAG"}
    saved = tmp_path / "chat_template.jinja"
    for form in ("folder", "list"):
        if form == "folder":
            (tmp_path / "additional_chat_templates").mkdir()
            for name in ("tool_use", "rag"):
                file = tmp_path / "additional_chat_templates" / f"{name}.jinja"
                file.write_text(names[name])
        else:
            saved.unlink()
            shutil.rmtree(tmp_path / "additional_chat_templates")
            config = json.loads((tmp_path / "tokenizer_config.json").read_text())
            config["chat_template"] = [{"name": n, "template": t} for n, t in names.items()]
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        codec = read_codec(tmp_path)
        assert codec.render(CALLED[:1]) == "<|user|>Add.<|end|><|assistant|>"
        assert codec.render(CALLED[:1], tools=TOOLS).startswith("TOOLS ")
        assert codec.render(CALLED).startswith("TOOLS ")  # the default one prints no calls
        assert "You can call functions" not in codec.render(CALLED, tools=TOOLS)


def test_a_last_message_with_a_call_goes_on(codec: TextCodec) -> None:
    talk = [CALLED[0], {"role": "assistant", "content": "I ad"}]
    text = said(codec, CHATML, talk, tools=TOOLS, add_generation_prompt=False,
                continue_final_message=True)  # fmt: skip
    assert text.endswith("<|user|>Add.<|end|><|assistant|>I ad")


def test_a_template_of_a_mebibyte_is_not_compiled() -> None:
    began = time.process_time()
    with pytest.raises(RequestError, match="it has more than 131072 characters"):
        render("{% set x = 1 %}" * 70_000, [{"role": "user", "content": "a"}])
    assert time.process_time() - began < 2
