"""Bodies of at most 4 MiB that would cost a server more than their size; each has a function."""

from __future__ import annotations

import json
from collections.abc import Callable

SIZE = (4 << 20) - 4096
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = '"messages":[{"role":"user","content":"a"}]'
"""What a chat needs."""


def repeated(part: str, opening: str = "[", closing: str = "]", size: int = SIZE) -> str:
    """A list of ``part`` again and again."""
    return opening + ",".join([part] * (size // (len(part.encode()) + 1))) + closing


def field(name: str, value: str, rest: str = '"prompt":"a"') -> bytes:
    """A body with one field beside ``rest``."""
    return f'{{"{name}":{value},{rest},"max_tokens":1}}'.encode()


def members(value: str, count: int) -> str:
    """An object with so many fields."""
    return "{" + ",".join(f'"{i}":{value}' for i in range(count)) + "}"


def nested(depth: int, opening: str = "[", closing: str = "]", inner: str = "1") -> str:
    """Lists or objects within each other."""
    return opening * depth + inner + closing * depth


def schema(depth: int) -> str:
    """A JSON schema whose objects nest."""
    return nested(depth, '{"properties":{"a":', "}}", "{}")


def tools(parameters: str, count: int) -> str:
    """Tools with the same parameters."""
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}'
    return repeated(tool, size=count * (len(tool) + 1))


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "prompt of objects": (COMPLETION, lambda: field("prompt", repeated("{}"), '"n":1')),
    "prompt of lists": (COMPLETION, lambda: field("prompt", repeated("[]"), '"n":1')),
    "prompt of lists of ids": (COMPLETION, lambda: field("prompt", repeated("[1]"), '"n":1')),
    "prompt of texts": (COMPLETION, lambda: field("prompt", repeated('"ab"'), '"n":1')),
    "prompt of nulls": (COMPLETION, lambda: field("prompt", repeated("null"), '"n":1')),
    "prompt of numbers": (COMPLETION, lambda: field("prompt", repeated("1.5"), '"n":1')),
    "prompt of ids": (COMPLETION, lambda: field("prompt", repeated("1"), '"n":1')),
    "prompt of ids and texts": (COMPLETION, lambda: field("prompt", repeated('1,"a"'), '"n":1')),
    "a long text": (COMPLETION, lambda: field("prompt", f'"{"ab " * (SIZE // 3)}"', '"n":1')),
    "a long word": (COMPLETION, lambda: field("prompt", f'"{"a" * SIZE}"', '"n":1')),
    "a text of quotes": (
        COMPLETION,
        lambda: field("prompt", '"' + r"\"{[" * (SIZE // 4) + '"', '"n":1'),
    ),
    "128 long texts": (
        COMPLETION,
        lambda: field("prompt", repeated(f'"{"ab " * 10_000}"', size=128 * 30_003), '"n":1'),
    ),
    "stop of numbers": (COMPLETION, lambda: field("stop", repeated("1"))),
    "stop of texts": (COMPLETION, lambda: field("stop", repeated('"a"'))),
    "stop of objects": (CHAT, lambda: field("stop", repeated("{}"), SAID)),
    "stop_token_ids": (COMPLETION, lambda: field("stop_token_ids", repeated('"a"'))),
    "allowed_token_ids": (COMPLETION, lambda: field("allowed_token_ids", repeated("1"))),
    "allowed ids for 128 prompts": (
        COMPLETION,
        lambda: field(
            "allowed_token_ids",
            repeated("5", size=500_000),
            f'"prompt":{repeated("[1]", size=512)}',
        ),
    ),
    "bad_words": (COMPLETION, lambda: field("bad_words", repeated("{}"))),
    "logit_bias": (COMPLETION, lambda: field("logit_bias", members('"x"', 300_000))),
    "logit_bias with a long key": (
        COMPLETION,
        lambda: field("logit_bias", f'{{"{"9" * SIZE}":1}}'),
    ),
    "a long model": (COMPLETION, lambda: field("model", f'"{"m" * SIZE}"')),
    "a long request_id": (COMPLETION, lambda: field("request_id", f'"{"r" * SIZE}"')),
    "a long cache_salt": (COMPLETION, lambda: field("cache_salt", f'"{"s" * SIZE}"')),
    "a long seed": (COMPLETION, lambda: field("seed", f'"{"9" * SIZE}"')),
    "a long number": (COMPLETION, lambda: field("seed", "9" * SIZE)),
    "a long unknown object": (COMPLETION, lambda: field("unknown", members("1", 380_000))),
    "unknown objects": (COMPLETION, lambda: field("unknown", repeated('{"":0}'))),
    "deep lists": (COMPLETION, lambda: field("unknown", nested(100_000))),
    "deep objects": (COMPLETION, lambda: field("unknown", nested(100_000, '{"a":', "}"))),
    "open lists": (COMPLETION, lambda: b"[" * SIZE),
    "open objects": (COMPLETION, lambda: b'{"a":' * (SIZE // 5)),
    "quotes": (COMPLETION, lambda: b'"' * SIZE),
    "backslashes": (COMPLETION, lambda: b'{"prompt":"' + b"\\" * SIZE),
    "guided_json, deep": (COMPLETION, lambda: field("guided_json", schema(950))),
    "guided_json, 950 deep": (COMPLETION, lambda: field("guided_json", schema(475))),
    "guided_json, a little too deep": (COMPLETION, lambda: field("guided_json", schema(40))),
    "guided_json as a deep text": (
        COMPLETION,
        lambda: field("guided_json", json.dumps(nested(30_000))),
    ),
    "guided_json, long": (COMPLETION, lambda: field("guided_json", members("{}", 60_000))),
    "guided_choice": (COMPLETION, lambda: field("guided_choice", repeated('"a"'))),
    "guided_regex": (COMPLETION, lambda: field("guided_regex", f'"{"(a|b)" * (SIZE // 5)}"')),
    "response_format": (
        CHAT,
        lambda: field(
            "response_format",
            '{"type":"json_schema","json_schema":{"schema":%s}}' % members("[]", 60_000),  # noqa: UP031
            SAID,
        ),
    ),
    "prediction of numbers": (
        COMPLETION,
        lambda: field("prediction", f'{{"content":{repeated("1")}}}'),
    ),
    "prediction of parts": (
        COMPLETION,
        lambda: field("prediction", f'{{"content":{repeated("{}", size=150_000)}}}'),
    ),
    "a prediction for 128 prompts": (
        COMPLETION,
        lambda: field(
            "prediction",
            f'{{"content":"{"ab " * (SIZE // 3)}"}}',
            f'"prompt":{repeated("[]", size=384)}',
        ),
    ),
    "messages of numbers": (CHAT, lambda: field("messages", repeated("1"), '"n":1')),
    "messages, empty": (CHAT, lambda: field("messages", repeated("{}"), '"n":1')),
    "messages with parts": (
        CHAT,
        lambda: field(
            "messages",
            repeated(f'{{"role":"user","content":{repeated("{}", size=45)}}}', size=300_000),
            '"n":1',
        ),
    ),
    "a long message": (
        CHAT,
        lambda: field("messages", f'[{{"role":"user","content":"{"a" * SIZE}"}}]', '"n":1'),
    ),
    "a long role": (CHAT, lambda: field("messages", f'[{{"role":"{"a" * SIZE}"}}]', '"n":1')),
    "a part of a long type": (
        CHAT,
        lambda: field(
            "messages", f'[{{"role":"user","content":[{{"type":"{"a" * SIZE}"}}]}}]', '"n":1'
        ),
    ),
    "long arguments": (
        CHAT,
        lambda: field(
            "messages",
            '[{"role":"model","content":"","tool_calls":[{"function":{"name":"f","arguments":%s}}]}'  # noqa: UP031
            ',{"role":"nobody"}]' % json.dumps(repeated("{}")),
            '"n":1',
        ),
    ),
    "many tools": (CHAT, lambda: field("tools", tools("{}", 50_000), SAID)),
    "tools with long schemas": (CHAT, lambda: field("tools", tools(members("1", 5_000), 60), SAID)),
    "a tool with a deep schema": (CHAT, lambda: field("tools", tools(schema(80), 1), SAID)),
    "a long tool_choice": (
        CHAT,
        lambda: field(
            "tool_choice",
            f'{{"function":{{"name":"{"f" * SIZE}"}}}}',
            f'"tools":{tools("{}", 1)},{SAID}',
        ),
    ),
    "chat_template_kwargs": (
        CHAT,
        lambda: field("chat_template_kwargs", members("1", 380_000), SAID),
    ),
    "tokenize": ("/tokenize", lambda: field("prompt", f'"{"ab " * (SIZE // 3)}"', '"n":1')),
    "tokenize messages": ("/tokenize", lambda: field("messages", repeated("{}"), '"n":1')),
    "detokenize": ("/detokenize", lambda: field("tokens", repeated("1"), '"n":1')),
    "detokenize texts": ("/detokenize", lambda: field("tokens", repeated('"1"'), '"n":1')),
    "speculation": ("/v1/speculation", lambda: field("drafter", repeated("{}"))),
}
"""By a name: a path and its body, which the path answers with 4xx."""
