"""Chat templates: the text that transformers makes, within a budget, and errors in a sentence."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from conftest import save_tokenizer

from outrider.errors import RequestError
from outrider.text.codec import TextCodec
from outrider.text.template import LONGEST_TEXT, STEPS, render

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
    return TextCodec(folder)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
def test_the_text_is_transformers(name: str, prompted: bool, codec: TextCodec) -> None:
    theirs = codec.tokenizer
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
    theirs = codec.tokenizer
    theirs.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}"
        "{% else %}{{ m.content[0].text }}{% endif %}</>{% endfor %}"
    )
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(talk, continue_final_message=True, tokenize=False)
    ids = theirs(expected, add_special_tokens=False)["input_ids"]
    assert codec.chat(talk, False, continue_final_message=True) == ids
    assert talk[-1]["content"] == content


BOMBS = {
    "{{ 1 / 0 }}": "division by zero",
    "{{ 'a' * 10**11 }}": f"more than {LONGEST_TEXT} characters",
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
    "{% endfor %}": f"more than {STEPS} steps",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nest too deeply",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}": (
        f"more than {STEPS} steps"
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
def test_what_a_template_does_is_bounded(template: str) -> None:
    started = time.thread_time()
    with pytest.raises(RequestError, match=BOMBS[template]) as error:
        render(template, [{"role": "user", "content": "hi"}])
    assert time.thread_time() - started < 30
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
    assert "steps" in found[2]


def test_long_conversations_stay_within_the_budget() -> None:
    talk = [{"role": "user", "content": "word " * 200}] * 4096  # 4 MB
    for template in TEMPLATES.values():
        render(template, talk, tools=None, documents=None)


@pytest.mark.parametrize("template", [{"a": "x"}, {"default": 3}, 7])
def test_a_template_that_is_none_is_refused(template: Any, codec: TextCodec) -> None:
    codec.tokenizer.chat_template = template
    with pytest.raises(RequestError):
        codec.chat([{"role": "user", "content": "hi"}])
