"""Values that servers stumble over: boundaries, wrong types, deep and long ones, odd text."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

RAW = re.compile(r'"<raw:((?:[^"\\]|\\.)*?)>"')


def raw(token: str) -> str:
    """A mark for what stands in the body as it is, since Python's json cannot write it."""
    return f"<raw:{token}>"


NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, True, False, 7, 4095, 4096, 4097, 2**31 - 1, 2**31, 2**31 + 1, -(2**31) - 1,
    2**32 - 1, 2**32, 2**32 + 3, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, -(2**63), 2**64 - 1,
    2**64, 10**19, -(10**19), 0.0, -0.0, 0.1, 0.5, 1.0, 1.5, -0.5, 1e-9, 5e-324, 2.2e-308, 1e38,
    -1e38,
    3.5e38, 1e308, -1e308, raw("1e999"), raw("-1e999"), raw("NaN"), raw("Infinity"),
    raw("-Infinity"), raw("9" * 4000), raw("9" * 6000), raw("-" + "9" * 4000), raw("1E400"),
    raw("0." + "0" * 400 + "1"), raw("1" + "0" * 400 + ".0"),
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "a", "1", "-1", "0", "1.5", "NaN", "null", "true", "\x00", "a\x00b", "\n\r\t",
    "\x1b[31m",
    "\ud800", "\udfff\ud800", "a\ud83d", "é", "e\u0301" * 20, "\u202eabc", "\u2028\u2029\x85",
    "\ufeff",
    "日本語", "🤖" * 10, "👩‍👩‍👧‍👦", "\U0010ffff", "%s%n%d", "../../etc/passwd", "{{7*7}}",
    "{% for i in range(9) %}x{% endfor %}", "<|end|>", "<|endoftext|>", "<s></s>", "<tool_call>",
    "<tool_call>{\"name\": 1}</tool_call>", "'; DROP TABLE x; --", "a" * 1000, "a" * 1001,
    "é" * 5000,
    "ab " * 3000, "\\", "\\u0000", "\"", "data: [DONE]\n\n", "\r\nX-Evil: 1", "9" * 30,
    "18446744073709551616",
)  # fmt: skip
REGEXES: tuple[str, ...] = (
    "", "(", "[a-", "(a+)+$", "a{1000000}", "a{2147483648}", "(?=x)", "(?<=x)y", "\\p{L}+", ".*",
    "(.|\\w)+!", "[^\\x00-\\x7f]", "\\1", "(a|b|c){0,500}", "((((((((((a))))))))))", "a**", "\\",
    "$^",
)  # fmt: skip
GRAMMARS: tuple[str, ...] = (
    "", "start: start", "start: x", 'start: "a" start | ', 'root ::= "a" root | "b"', "start: /(/",
    'start: "a"{1000000}', 'start: "' + "a" * 2000 + '"', "\x00", 'start: ""',
    "root ::= root root", 'start: ("a" | "b")* "c"', "%ignore /./", "start: %json {",
)  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    {}, True, False, {"type": "any"}, {"type": []}, {"type": 5}, {"$ref": "#"},
    {"$ref": "#/nowhere"},
    {"$ref": "http://127.0.0.1:9/x"}, {"type": "string", "pattern": "("}, {"enum": []},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "string", "minLength": 2**31}, {"type": "string", "maxLength": -1},
    {"type": "array", "minItems": 10**9}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "integer", "minimum": 1e308, "maximum": -1e308}, {"type": "integer", "multipleOf": 0},
    {"type": "number", "multipleOf": 1e-300}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}}, {"if": {}, "then": {}}, {"patternProperties": {"(": {}}}, {"const": {"a": [1,
    None]}},
    {"oneOf": []}, {"anyOf": [{}] * 50}, {"enum": ["a" * 500] * 50}, {"required": ["x"] * 100},
    {"type": "object", "additionalProperties": {"$ref": "#"}}, {"format": "date-time",
    "type": "string"},
    {"type": "object", "required": "a"}, {"properties": []}, {"x-guidance": 5}, {"$defs": {"a": 1}},
    {"type": "string", "format": "\ud800"}, {"prefixItems": [{}] * 30, "items": False},
)  # fmt: skip


NESTED = {
    "list": ("[", "", "]"), "object": ('{"a":', "1", "}"),
    "schema": ('{"type":"object","properties":{"a":', '{"type":"string"}', "}}"),
}  # fmt: skip
"""The beginning, the filling and the end of a value that nests."""
DEPTHS = (2, 10, 63, 65, 190, 210, 950, 5000)


def number(draw: random.Random) -> Any:
    """A number, mostly at a boundary."""
    return draw.choice(NUMBERS)


def deep(kind: str, depth: int) -> str:
    """Return a value of ``NESTED`` that nests so deep."""
    start, inner, end = NESTED[kind]
    return raw(start * depth + inner + end * depth)


def text(draw: random.Random) -> str:
    """A text that is odd, or made of random characters."""
    if draw.random() < 0.7:
        return draw.choice(TEXTS)
    low, high = draw.choice(((0x20, 0x7F), (0x80, 0x2FFF), (0xD7F0, 0xE010), (0x1F300, 0x1FAFF)))
    return "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 40)))


def long(draw: random.Random) -> Any:
    """A list or an object of thousands of members; about 100 KB at most."""
    count = draw.choice((65, 257, 1025, 4097, 20_000))
    member: Any = draw.choice(
        (1, -1, 2**31, "a", "", {}, [], None, True, 0.5, [1], {"role": "user"})
    )
    if draw.random() < 0.3:
        return {str(i): member for i in range(count // 2)}
    return [member] * count


def mixed(draw: random.Random) -> Any:
    """A small list or object of anything."""
    members = [hostile(draw) for _ in range(draw.randint(0, 4))]
    if draw.random() < 0.5:
        return members
    return {text(draw)[:50]: member for member in members}


def schema(draw: random.Random) -> Any:
    """A JSON schema that is wrong, without end, or impossible."""
    return draw.choice([*SCHEMAS, *(deep("schema", depth) for depth in (30, 66, 300))])


KINDS: tuple[tuple[Callable[[random.Random], Any], int], ...] = (
    (number, 40), (text, 30), (mixed, 10), (long, 1), (schema, 5),
    (lambda draw: deep(draw.choice([*NESTED]), draw.choice(DEPTHS)), 4),
    (lambda draw: draw.choice((None, [], {}, [[]])), 10),
)  # fmt: skip
"""Makers of values, and their weights."""


def hostile(draw: random.Random) -> Any:
    """Any of these."""
    makers, weights = zip(*KINDS, strict=True)
    return draw.choices(makers, weights)[0](draw)


def dumps(value: Any) -> bytes:
    """JSON in ASCII, with every ``raw`` token as it is."""
    return RAW.sub(lambda match: str(json.loads(f'"{match[1]}"')), json.dumps(value)).encode()
