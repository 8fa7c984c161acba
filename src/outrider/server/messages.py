"""Messages as clients send them, made into what chat templates read."""

from __future__ import annotations

from typing import Any

from .bodies import parse
from .shapes import Refusal, shortened

MESSAGE_PARTS = ("text", "input_text")


def readable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: parts of text joined, arguments of calls as objects.

    Raises:
        Refusal: a message has no role, or a part that is no text.
    """
    found = []
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise Refusal(f"messages.{i} has no role; give system, user or assistant.", "messages")
        made = {**message, "content": _text(content, i)}
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            made["tool_calls"] = [_call(call) for call in calls]
        found.append({k: v for k, v in made.items() if v is not None or k == "content"})
    return found


def _text(content: Any, i: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(f"messages.{i}.content is neither text nor a list of parts.", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in MESSAGE_PARTS or not isinstance(part.get("text"), str):
            raise Refusal(
                f"messages.{i}.content has a part of type {shortened(kind)}; only text is served.",
                "messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any) -> Any:
    """A call with its arguments as an object, as templates print them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {
            **call,
            "function": {**function, "arguments": parse(function["arguments"].encode())},
        }
    except (Refusal, UnicodeEncodeError):
        return call
