"""Tools: what the model may call, what it must write, and which calls it wrote.

Two forms are read: Hermes' (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, Qwen's as
well) and Llama 3's (``{"name": ..., "parameters": {...}}``, several parted by semicolons).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .protocol import ChatRequest, NamedTool, Refusal, Tool, check_schema

Form = Literal["hermes", "llama3"]
HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
OPENING = "<tool_call>"
PYTHON_TAG = "<|python_tag|>"
ANY_OBJECT: dict[str, Any] = {"type": "object"}
COMPACT: dict[str, Any] = {"x-guidance": {"whitespace_flexible": False}}
"""Arguments are read by programs: nothing is spent on blanks."""


@dataclass(frozen=True)
class Call:
    """A call that the model wrote; ``arguments`` is JSON."""

    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """As clients see it, with its ``index`` in a stream."""
        found: dict[str, Any] = {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return found if index is None else {"index": index, **found}


def form_of(template: str | None) -> Form:
    """Which form a model writes, told from its chat template."""
    return "llama3" if template and PYTHON_TAG in template else "hermes"


def choice_of(body: ChatRequest) -> str:
    """none, auto, required, or the name of the one tool.

    Raises:
        Refusal: a choice without tools, an unknown name, or a schema that is too large.
    """
    tools, choice = body.tools or [], body.tool_choice
    for tool in tools:
        check_schema(tool.function.parameters or {}, "tools")
    if isinstance(choice, NamedTool):
        if choice.function.name not in {t.function.name for t in tools}:
            raise Refusal(
                f"tool_choice names {choice.function.name!r}, which is not among tools.",
                "tool_choice",
            )
        return f"={choice.function.name}"
    if choice in ("auto", "required") and not tools:
        raise Refusal(f"tool_choice is {choice!r}, but there are no tools.", "tool_choice")
    return choice or ("auto" if tools else "none")


def constraint(body: ChatRequest, choice: str) -> dict[str, Any] | None:
    """The JSON schema that the output must follow, None where the model is free.

    A named tool's output is its arguments; "required" is a list of calls.
    """
    tools = body.tools or []
    if choice.startswith("="):
        return next(_parameters(t) for t in tools if t.function.name == choice[1:]) | COMPACT
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name}, "arguments": _parameters(tool),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]  # fmt: skip
    found = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **COMPACT}
    return found if body.parallel_tool_calls else {**found, "maxItems": 1}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or ANY_OBJECT


def read_calls(
    text: str, choice: str, form: Form, tools: Sequence[Tool]
) -> tuple[str | None, list[Call]]:
    """The content and the calls in a whole output; what is no call stays content."""
    if choice == "none":
        return text, []
    if choice.startswith("="):
        return None, [Call(choice[1:], text)]
    if choice == "required":
        return (None, found) if (found := _listed(_loads(text))) else (text, [])
    known = {tool.function.name for tool in tools}
    content, found = _hermes(text) if form == "hermes" else _llama3(text)
    if not found or not all(call.name in known for call in found):
        return text, []
    return content.strip() or None, found


def may_call(text: str, form: Form) -> bool:
    """Whether the beginning of an output may be the beginning of a call, so that it must wait."""
    if form == "hermes":
        tail = any(text.endswith(OPENING[:i]) for i in range(1, len(OPENING)))
        return tail or OPENING in text
    start = text.lstrip()
    return not start or start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _listed(found: Any) -> list[Call]:
    """The calls in a JSON value, none if any part of it is no call."""
    calls = []
    for one in found if isinstance(found, list) else [found]:
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            return []
        given = one.get("arguments", one.get("parameters", {}))
        calls.append(Call(one["name"], given if isinstance(given, str) else json.dumps(given)))
    return calls


def _hermes(text: str) -> tuple[str, list[Call]]:
    calls: list[Call] = []
    for part in HERMES.findall(text):
        found = _listed(_loads(part))
        if not found:
            return text, []
        calls += found
    return text.partition(OPENING)[0], calls


def _llama3(text: str) -> tuple[str, list[Call]]:
    """One JSON object after another, with semicolons, commas or nothing between."""
    rest = text.strip().removeprefix(PYTHON_TAG).strip()
    decoder, calls = json.JSONDecoder(), []
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError:
            return text, []
        found = _listed(value)
        if not found:
            return text, []
        calls += found
        rest = rest[end:].lstrip("; \n\t,")
    return "", calls
