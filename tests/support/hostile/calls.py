"""Readers of what servers and their clients send each other; see ``hostile_readers``."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from outrider.errors import OutriderError, RequestError
from tests.support.hostile import inputs as made
from tests.support.hostile.inputs import damaged, jsons, texts, trees
from tests.support.hostile.readers import STATUSES, Made, answering, check_said, reader

SCHEMA = {
    "type": "object", "$defs": {"n": {"type": ["string", "null"], "maxLength": 5}},
    "properties": {"name": {"$ref": "#/$defs/n"}, "age": {"type": "integer", "minimum": 0},
                   "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    "required": ["name"], "patternProperties": {"^x-": {"type": "string", "pattern": "[a-z]+"}},
    "additionalProperties": False,
}  # fmt: skip
OPTIONS = {
    "model": "m", "stream": True, "stream_options": {"include_usage": True}, "n": 1,
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["a"],
    "stop_token_ids": [1], "min_tokens": 1, "max_tokens": 5, "logit_bias": {"5": 1.0},
    "bad_words": ["b"], "allowed_token_ids": [1, 2], "presence_penalty": 0.1, "priority": 0,
    "prompt_logprobs": 1, "request_id": "abc", "cache_salt": "s", "timeout": 5.0,
    "speculation": {"enabled": True, "num_speculative_tokens": 4, "drafter": "ngram"},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}}, {"guided_regex": "[a-z]{3}"},
    {"structured_outputs": {"choice": ["a", "b"]}}, {"guided_grammar": 'start: "a" | "b"'},
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALLED = {"role": "assistant", "content": None,
          "tool_calls": [{"id": "1", "type": "function",
                          "function": {"name": "f", "arguments": '{"a": 1}'}}]}  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    CALLED, {"role": "tool", "tool_call_id": "1", "content": "3"},
]  # fmt: skip


def refused(body: bytes, model: Any) -> Any:
    """A body's fields, or the sentence of its refusal as an ``OutriderError``."""
    from fastapi.exceptions import RequestValidationError

    from outrider.server.bodies import read
    from outrider.server.errors import Refusal, sentence

    try:
        return read(model, body)
    except RequestValidationError as error:
        raise Refusal(*sentence(error.errors())) from None


def sampled(body: Any) -> None:
    """Make the sampling options of a body, as a call does."""
    from outrider.errors import ConfigError
    from outrider.server.protocol import to_refusal

    try:
        body.sampling(100, {})
    except ConfigError as error:
        raise to_refusal(error) from None


@reader("server: completions")
def completions(folder: Path) -> Made:
    from outrider.server.protocol import CompletionRequest

    def call(data: bytes) -> None:
        body = refused(data, CompletionRequest)
        body.prompts()
        sampled(body)

    samples = [{**OPTIONS, "prompt": "a", **form} for form in FORMS]
    return jsons(*samples, {"prompt": [[1, 2], [3]]}), call


@reader("server: chats")
def chats(folder: Path) -> Made:
    from outrider.server import texts, tools
    from outrider.server.protocol import ChatRequest
    from outrider.text.messages import readable

    def call(data: bytes) -> None:
        body = refused(data, ChatRequest)
        choice = tools.choice_of(body)
        for form in ("hermes", "llama3"):
            tools.constraint(choice, form, frozenset())  # type: ignore[arg-type]
        texts.template_options(body, "{{ reasoning_effort }} {{ documents }}")
        readable(body.messages)
        sampled(body)

    chat = {**OPTIONS, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto",
            "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}  # fmt: skip
    return jsons(chat, {**chat, **FORMS[0]}, {"messages": MESSAGES}), call


@reader("server: tokenize")
def tokenize(folder: Path) -> Made:
    from outrider.server.protocol import TokenizeRequest

    sample = {"model": "m", "messages": MESSAGES, "tools": [TOOL], "return_token_strs": True}
    return jsons({"prompt": "a"}, sample), lambda data: refused(data, TokenizeRequest)


@reader("server: detokenize")
def detokenize(folder: Path) -> Made:
    from outrider.server.protocol import DetokenizeRequest

    return jsons({"model": "m", "tokens": [1, 2, 3]}), lambda data: refused(data, DetokenizeRequest)


@reader("server: speculation")
def speculation(folder: Path) -> Made:
    from outrider.server.protocol import SpeculationChange
    from outrider.server.speculation import drafter_in

    (folder / "near" / "by").mkdir(parents=True, exist_ok=True)

    def call(data: bytes) -> None:
        body = refused(data, SpeculationChange)
        if body.load is not None:
            assert drafter_in(folder, body.load).resolve().is_relative_to(folder.resolve())

    sample = {"enabled": True, "drafter": "ngram", "num_speculative_tokens": 4}
    return jsons(sample, {"load": "near"}, {"load": "near/by"}), call


@reader("what a server says that a drafter is adapted from")
def adapted_from(folder: Path) -> Made:
    from outrider.training import from_server

    for name in ("recorded", "drafters"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "recorded" / from_server.RECORDED).write_bytes(b'{"prompt": "a"}\n' * 9)
    sample = {
        "drafter": "auto", "target": str(folder), "drafters": {"model": {"folder": str(folder)}},
        "recording": {"folder": str(folder / "recorded"), "records": 900, "bytes": 99},
        "loading": {"folder": str(folder / "drafters")},
    }  # fmt: skip

    def call(case: tuple[bytes, int]) -> None:
        with answering([from_server], *case):
            source = from_server.ask("http://e:1", None)
            from_server.keep_prompts(source, folder / "out")
            check_said(from_server.command(source, "a"))
            from_server.load(source, "a")

    return st.tuples(jsons(sample, {"error": {"message": "a"}}), STATUSES), call


@reader("server: calls that a model writes")
def written_calls(folder: Path) -> Made:
    from outrider.server.reader import Reader
    from outrider.text.calls import MARKS
    from outrider.text.reasoning import FORMS

    hermes = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call> x'
    llama = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    python = "<think>\nso\n</think>\n\n<|tool_call_start|>[f(a=1, b={'c': [2]})]<|tool_call_end|>"
    xml = "<tool_call>\n<function=f>\n<parameter=a>\n[1]\n</parameter>\n</function>\n</tool_call>"
    mistral = '[THINK]so[/THINK]x[TOOL_CALLS]f[CALL_ID]a[ARGS]{"a": 1}[TOOL_CALLS] [{"name": "f", '
    channels = (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to="
        'functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )

    def call(text: str) -> None:
        for form in MARKS:
            for how in ("auto", "required", "=f"):
                for reasoning in (None, *FORMS.values()):
                    reader = Reader(reasoning, form, how, {"f": {"a": {"type": ["string"]}}})
                    certain, said = reader.read(text, False), reader.read(text, True)
                    assert said.thoughts.startswith(certain.thoughts)

    return texts(damaged(hermes, llama, python, xml, mistral, channels)), call


@reader("server: content types, hosts, keys")
def headers(folder: Path) -> Made:
    from outrider.server.bodies import check_type
    from outrider.server.build import read_hosts, read_keys

    def call(data: bytes) -> None:
        text = data.decode("utf-8", "surrogateescape")  # as of arguments
        for read, said in (
            (check_type, data.decode("latin-1")),  # as of headers
            (read_hosts, text),
            (lambda keys: read_keys(keys, None), text),
        ):
            try:
                read(said)
            except OutriderError as error:
                check_said(str(error))

    return damaged("application/json; charset=utf-8", "a.example,b.example", "k1,k2"), call


@reader("sampling options")
def sampling(folder: Path) -> Made:
    from outrider.params import SamplingParams

    sample = {name: OPTIONS[name] for name in (
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens",
        "max_tokens", "logit_bias", "bad_words", "allowed_token_ids", "presence_penalty", "n",
    )}  # fmt: skip
    forms = [{**sample, "structured_outputs": form} for form in ({"json": SCHEMA}, {"regex": "a"})]

    def call(case: Any) -> None:
        if isinstance(case, dict):
            SamplingParams(**{str(name): value for name, value in case.items()})

    return trees(sample, *forms), call


def grammars() -> Any:
    """The compiler of grammars, for the tests' own tokenizer."""
    from outrider.sampling.grammar import Grammars
    from tests.support.tiny import byte_level_tokenizer

    return Grammars(byte_level_tokenizer, 320, frozenset({0}))


def compiled(compiler: Any, **form: Any) -> None:
    """Compile a form, and take a few steps."""
    from outrider.params import SamplingParams

    grammar = compiler.compile(SamplingParams(structured_outputs=form))
    for _ in range(6):
        (mask,) = grammar.masks([[]])
        if mask is None or isinstance(mask, str):
            return
        allowed = np.unpackbits(mask, bitorder="little").nonzero()[0]
        if not len(allowed) or allowed[-1] == 0:
            return
        grammar.advance([int(allowed[-1])])


@reader("grammar: JSON schemas")
def schemas(folder: Path) -> Made:
    compiler = grammars()
    words = st.sampled_from([
        {"$ref": "#"}, {"$ref": "#/properties/name"}, {"$ref": "http://x/y"}, {"allOf": [{}, {}]},
        {"not": {}}, {"pattern": "(a+)+$"}, {"pattern": "["}, {"minItems": 10**6}, {"maxItems": -1},
        {"multipleOf": 0}, {"minimum": 10**400, "type": "number"}, {"enum": []}, {"const": [{}]},
        {"minLength": 10**9, "type": "string"}, {"oneOf": [{"type": "x"}]}, {"format": "uri"},
        {"type": "object", "minProperties": 10**6}, {"prefixItems": [{}] * 500}, {"type": []},
        {"properties": {str(i): {} for i in range(500)}}, {"x-guidance": {"whitespace_pattern": 3}},
    ])  # fmt: skip

    def call(schema: Any) -> None:
        if isinstance(schema, dict):
            compiled(compiler, json=schema)

    return trees(SCHEMA, values=st.one_of(made.VALUES, words, words, words)), call


@reader("grammar: regexes")
def regexes(folder: Path) -> Made:
    compiler = grammars()
    samples = ("[a-z]{3,5}(foo|bar)*", r"\d{4}-\d\d(?=x)", "(a|b)*c{1,1000}", r"(?i)\p{L}+")
    return texts(damaged(*samples)), lambda text: text and compiled(compiler, regex=text)


@reader("grammar: Lark and GBNF")
def larks(folder: Path) -> Made:
    compiler = grammars()
    lark = (
        'start: item+\nitem: "a" | NAME\nNAME: /[a-z]+/\n%ignore " "\nx: %json {"type": "null"}\n'
    )
    gbnf = 'root ::= item+\nitem ::= "a" | [a-z]{1,3} ("x" | item)?\n'
    return texts(damaged(lark, gbnf)), lambda text: text and compiled(compiler, grammar=text)


@reader("grammar: choices")
def choices(folder: Path) -> Made:
    compiler = grammars()

    def call(choice: Any) -> None:
        if isinstance(choice, list):
            compiled(compiler, choice=choice)

    return trees(["yes", "no", "maybe"]), call


HEADS = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"a": 1}\n',
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://other/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 Not Found\r\n\r\nno",
    b"HTTP/1.0 503 \xff\xfe\r\nX\r\n\r\n",
    b"HTTP/1.1 204 No\r\n\r\n",
    b"HTTP/1.1 200\r\n\r\nrest",
    b"HTTP/1.1 500 Oops\r\nX: y\r\n z\r\nContent-Length: 2\r\n\r\nno",
)
HEAD_PIECES = (
    *made.PIECES, b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, b"X: y\r\n" * 5000,
    b"18446744073709551616",
    b"-1", b"Content-Length: 5\r\nContent-Length: 6\r\n", b"ffffffffffffffff\r\n",
    b"Transfer-Encoding: gzip\r\n", b"200 " + b"O" * 70_000, b"999", b"\r\n" * 2000,
    b"X: " + b"y" * 100_000 + b"\r\n",
)  # fmt: skip


class Peer:
    """A server on loopback that answers each connection with bytes, and closes it."""

    def __init__(self) -> None:
        self.bytes = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                try:
                    connection.settimeout(1.0)
                    connection.recv(1 << 16)
                    connection.sendall(self.bytes)
                    connection.shutdown(socket.SHUT_WR)
                except OSError:
                    continue  # the client had enough


def from_peer(ask: Callable[[Peer], object]) -> Callable[[bytes], object]:
    """A call that asks a peer which answers with the case."""
    peer = Peer()

    def call(data: bytes) -> object:
        peer.bytes = data
        return ask(peer)

    return call


@reader("HTTP answers")
def answers(folder: Path) -> Made:
    from outrider.base.outside.http import call

    def ask(peer: Peer) -> None:
        call(f"http://127.0.0.1:{peer.port}/x", seconds=1.0).json()

    return damaged(*HEADS, pieces=HEAD_PIECES), from_peer(ask)


@reader("HTTP answers of a load test")
def loaded_answers(folder: Path) -> Made:
    from outrider.base.outside.stamped import Client

    async def answer(port: int) -> None:
        client = Client(f"http://127.0.0.1:{port}")
        try:
            await client.ask("/v1/models", seconds=1.0)
        finally:
            await client.close()

    return damaged(*HEADS, pieces=HEAD_PIECES), from_peer(lambda p: asyncio.run(answer(p.port)))


@reader("HTTP answers of an endpoint")
def endpoint_answers(folder: Path) -> Made:
    from outrider.ops.diagnose.endpoint import Endpoint

    head = b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n" + b'{"data":[{"id": "m"}]}'
    return damaged(head, *HEADS[:2], *HEADS[3:], pieces=HEAD_PIECES), from_peer(
        lambda peer: Endpoint(f"http://127.0.0.1:{peer.port}").model()
    )


@reader("switch: HAProxy")
def switch_haproxy(folder: Path) -> Made:
    from outrider.ops.guard.policy import PolicyTraffic
    from outrider.ops.guard.switches import HAProxy

    def ask(peer: Peer) -> None:
        place = f"tcp:127.0.0.1:{peer.port}"
        own = HAProxy(PolicyTraffic("haproxy", place, backend="b", engine="e", standby="s"))
        for act in (own.read, partial(own.set, (1, 2))):  # no answer suits both
            try:
                act()
            except OutriderError as error:
                check_said(str(error))

    return damaged("\n", "100 (initial 100)\n\n", "No such server.\n"), from_peer(ask)


TEMPLATE = (
    "{%- for m in messages %}{% if m.role == 'user' %}{{ '<|u|>' + m['content'] | trim }}"
    "{% elif m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson(indent=2) }}"
    "{% elif m.role == 'no' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    "{% macro f(x, n=3) %}{{ x * n }}{% endmacro %}{{ f('a') }}{% set ns = namespace(i=0) %}"
    "{% for i in range(9) %}{% set ns.i = ns.i + i %}{% endfor %}{{ strftime_now('%Y') }}"
)
JINJA = (
    *made.PIECES, b"range(10**9)", b"'a' * 10**9", b"{{ [[1]*9999]*9999 }}",
    b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    b"{{ ''.__class__.__mro__ }}",
    b"{{ 9**9**9**9 }}", b"{{ '%1000000000d' % 1 }}",
    b"{% macro g() %}{{ g() }}{% endmacro %}{{ g() }}",
    b"| center(10**9)", b"{% include 'x' %}", b"{% extends 'x' %}", b"{% raw %}", b"{{ (" * 500,
    b"{{ 'a' | replace('', 'b' * 99999) | replace('', 'c' * 99999) }}",
    b"{{ messages | tojson }}" * 99,
    b"{% set x = messages * 999999 %}", b"{{ lipsum(99999) }}", b"{{ cycler }}", b"{{ self }}",
    b"{{ 1 / 0 }}", b"{{ x.y.z }}", b"{{ '\\ud800' }}", b"{% break %}",
    b"{{ dict(a=1) | xmlattr }}",
)  # fmt: skip


@reader("chat template")
def template(folder: Path) -> Made:
    from outrider.text.template import render

    def call(text: str) -> None:
        render(text, MESSAGES, tools=[TOOL], add_generation_prompt=True)

    return texts(damaged(TEMPLATE, pieces=JINJA)), call


@reader("messages of a chat")
def chat_messages(folder: Path) -> Made:
    from outrider.text.template import render

    plain = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ tools | tojson }}"

    def call(case: Any) -> None:
        if not isinstance(case, list):
            raise RequestError("no list")  # the server's and LLM.chat's own check
        render(plain, case, tools=case)
        render(plain, case, tools=None, continue_final_message=True)

    return trees(MESSAGES), call
