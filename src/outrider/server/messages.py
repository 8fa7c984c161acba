"""Turns clients' messages into the form that chat templates read."""

import inspect
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import shown
from .bodies import parse
from .errors import Refusal
from .protocol import Templated

MESSAGE_PARTS = ("text", "input_text")
OTHER_FIELDS = {"audio": "send text", "function_call": "send tool_calls"}
"""Fields of a message that no template reads here, and what to do instead."""
TEMPLATE_OWN = frozenset(
    {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
)
"""Names in a template's call that are not the client's to give in ``chat_template_kwargs``."""


def template_options(body: Templated, template: str) -> dict[str, Any]:
    """Return what the chat template gets besides messages and tools.

    Raises:
        Refusal: options contradict each other, or the template does not read one.
    """
    options = dict(body.chat_template_kwargs or {})
    wrong = TEMPLATE_OWN.intersection(options)
    if wrong:
        raise Refusal(f"{min(wrong)} is not for the template.", "chat_template_kwargs")
    if body.documents:
        if not _reads(template, "documents"):
            raise Refusal(
                "the chat template of this model reads no documents; put them into a message.",
                "documents",
            )
        options["documents"] = body.documents
    effort = body.reasoning_effort
    if effort is not None:
        values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        supported = {n: v for n, v in values.items() if _reads(template, n)}
        if not supported and effort != "none":
            raise Refusal(
                "the chat template of this model reads no reasoning_effort; leave it out.",
                "reasoning_effort",
            )
        options = supported | options
    if body.continue_final_message:
        options["continue_final_message"] = True
    return options


def wants_generation_prompt(body: Templated) -> bool:
    """Return whether the prompt ends with the beginning of a new message.

    Raises:
        Refusal: the last message shall be continued as well.
    """
    if not body.continue_final_message:
        return body.add_generation_prompt
    if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise Refusal(
            "add_generation_prompt and continue_final_message exclude each other; give one.",
            "continue_final_message",
        )
    return False


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None


def readable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for chat templates: parts of text joined, arguments of calls as objects.

    Raises:
        Refusal: a message has no role, or a part that is no text.
    """
    templated = []
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise Refusal(f"messages.{i} has no role; give system, user or assistant.", "messages")
        for name, remedy in OTHER_FIELDS.items():
            if message.get(name) is not None:
                raise Refusal(f"messages.{i}.{name} is not supported; {remedy}.", "messages")
        fields = {**message, "content": _text(content, i)}
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            fields["tool_calls"] = [_call(call) for call in calls]
        templated.append({k: v for k, v in fields.items() if v is not None or k == "content"})
    return templated


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
                f"messages.{i}.content has a part of type {shown(kind)}; only text is served.",
                "messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _call(call: Any) -> Any:
    """Return a call with its arguments as an object, the form that templates print."""
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
