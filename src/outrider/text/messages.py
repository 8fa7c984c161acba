"""Turns messages of clients into the form that chat templates read."""

import json
from typing import Any

from ..errors import RequestError, shown

PARTS = ("text", "input_text", "output_text")
OTHER_FIELDS = {"audio": "send text", "function_call": "send tool_calls"}
"""Fields of a message that are not supported, and what to do instead."""
MOST_BRACKETS = 1 << 16
"""Most lists and objects in the arguments of a call; with more they stay text."""


def readable(messages: list[Any]) -> list[dict[str, Any]]:
    """Return messages for chat templates: parts of text joined, arguments of calls as objects."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(f"{where} is not an object; give one with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{where} has no role; give system, user or assistant.")
    for name, remedy in OTHER_FIELDS.items():
        if message.get(name) is not None:
            raise _wrong(f"{where}.{name} is not supported; {remedy}.")
    refusal = message.get("refusal")
    content = _text(message.get("content"), where) or (refusal if isinstance(refusal, str) else "")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _wrong(f"{where}.tool_calls is {shown(calls)}; give a list of calls.")
    own = {n: value for n, value in message.items() if value is not None and n != "tool_calls"}
    own["content"] = content
    if calls:
        own["tool_calls"] = [_call(c, f"{where}.tool_calls[{j}]") for j, c in enumerate(calls)]
    return own


def _wrong(sentence: str) -> RequestError:
    return RequestError(sentence, "messages")


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _wrong(f"{where}.content is neither text nor a list of parts.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if kind not in (*PARTS, "refusal") or not isinstance(text, str):
            raise _wrong(f"{where}.content has a part of type {shown(kind)}; only text is served.")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, the form that templates print."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(f"{where} has no function with a name; give one.")
    arguments = _arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(value: Any) -> Any:
    """Return the arguments of a call as an object, as text if they are not JSON, {} for none."""
    if isinstance(value, str):
        if value.count("{") + value.count("[") > MOST_BRACKETS:
            return value
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            return value
    return {} if value is None else value
