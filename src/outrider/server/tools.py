"""Tools: their check, the grammar of calls, and the calls that the model wrote.

A grammar holds calls to their form (see ``text/calls.py``) and arguments to their schemas, so that
they can be read while they come.
"""

import json
import re
import uuid
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import shown
from ..params import LARGEST_GRAMMAR
from ..sampling.schemas import BLANKS, opened
from ..text.calls import CLOSING, OPENING, PYTHON_TAG, Form
from ..text.stop import longest_start
from .errors import Refusal
from .protocol import ChatRequest, NamedTool, Tool
from .shapes import check_schema

MARKS: dict[Form, set[str]] = {"hermes": {OPENING, CLOSING}, "llama3": {PYTHON_TAG}}
"""Texts that mark calls; often they are special tokens."""
HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""The text before the arguments of a call."""
PARTS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]')
"""Strings, which may hold brackets, and brackets."""
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}
SAY_NOTHING = ("type", "$schema", "$defs", "definitions", "title", "description")
"""Keywords of a schema that name no argument."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model writes; ``arguments`` is the JSON so far, until it is ``whole``."""

    name: str
    arguments: str
    whole: bool = field(default=True, compare=False)
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the call as clients see it."""
        return {
            "id": self.id, "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }  # fmt: skip


def check_tools(tools: Sequence[Tool]) -> None:
    """Refuse schemas that are too large or too deep, alone or together."""
    size = sum(check_schema(tool.function.parameters or {}, "tools") for tool in tools)
    if size > LARGEST_GRAMMAR:
        raise Refusal(
            f"the schemas of all tools have {size} characters; give at most {LARGEST_GRAMMAR}.",
            "tools",
        )


def choice_of(body: ChatRequest) -> str:
    """Return none, auto, required, or the name of the one tool behind a "="."""
    tools, choice = body.tools or [], body.tool_choice
    check_tools(tools)
    if isinstance(choice, NamedTool):
        if choice.function.name not in {t.function.name for t in tools}:
            raise Refusal(
                f"tool_choice names {shown(choice.function.name)}, which is not among tools.",
                "tool_choice",
            )
        return f"={choice.function.name}"
    if choice in ("auto", "required") and not tools:
        raise Refusal(f"tool_choice is {choice!r}, but there are no tools.", "tool_choice")
    return choice or ("auto" if tools else "none")


def constraint(
    body: ChatRequest, choice: str, form: Form, special: Container[str], others: Sequence[int] = ()
) -> dict[str, Any] | None:
    """Return the form of the output for ``StructuredOutputsParams``, None for any.

    With a named tool the output is its arguments, with "required" a list of calls, and with "auto"
    calls in the model's form and free text that may contain every token. ``special`` has the texts
    of special tokens, ``others`` the ids of those that neither mark calls nor end a text.
    """
    tools = body.tools or []
    if choice.startswith("="):
        named = next(tool for tool in tools if tool.function.name == choice[1:])
        return {"json": _parameters(named)}
    if choice == "none":
        return None
    several = body.parallel_tool_calls
    mark = f"<[{','.join(map(str, others))}]>" if others else ""
    if choice == "required":
        more = '(W "," W call)*' if several else ""
        rules = [f'start: "[" W call {more} W "]"']
    elif form == "llama3":
        tag = f"{PYTHON_TAG}? " if PYTHON_TAG in special else ""
        more = '(W ";" W call)*' if several else ""
        lead, rest = (f"(B? {mark})*", f"({mark} TEXT)*") if mark else ("", "")
        rules = [f"start: {lead} (FREE {rest})? | {tag}W call {more} W"]
    else:
        before = f"(TEXT {mark})*" if mark else ""
        rules = [
            f"start: call_in_text{'*' if several else ' W |'} {before} TEXT",
            "call_in_text: opening W call W closing",
            f"opening: {before} spelled" + f" | {before} TEXT {OPENING}" * (OPENING in special),
            f"spelled[lazy]: TEXT {json.dumps(OPENING)}",
            f"closing: {json.dumps(CLOSING)}" + f" | {CLOSING}" * (CLOSING in special),
        ]
    return {"grammar": _grammar(rules, tools, "parameters" if form == "llama3" else "arguments")}


def _grammar(rules: list[str], tools: Sequence[Tool], key: str) -> str:
    """Return a grammar in llguidance's dialect of Lark, with each schema a document of its own."""
    rules = [
        *rules,
        r"TEXT: /(.|\n)*/",
        r"FREE: /[ \n\t]*[^{ \n\t](.|\n)*/",
        r"B: /[ \n\t]+/",
        f"W: /{BLANKS}?/",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        parts = ("{", '"name"', ":", json.dumps(tool.function.name), ",", f'"{key}"', ":")
        head = " W ".join(map(json.dumps, parts))
        rules.append(f'call_{i}: {head} W arguments_{i} W "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(_parameters(tool))}")
    return "\n".join(rules)


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments; a tool without parameters takes ``{}`` only."""
    given = tool.function.parameters or {}
    said = {keyword: value for keyword, value in given.items() if keyword not in SAY_NOTHING}
    if said.get("additionalProperties", False) is False and not any(said.values()):
        return NO_ARGUMENTS
    schema = {"type": "object", **given}
    return opened(schema) if tool.function.strict is False else schema


def read(text: str, choice: str, form: Form, whole: bool) -> tuple[str, list[ToolCall]]:
    """Return the content and the calls of an output; only the certain part unless ``whole``."""
    if choice == "none":
        return text, []
    if choice.startswith("="):
        return "", [ToolCall(choice[1:], text)]
    if choice == "required":
        return "", _calls(text)
    if form == "hermes":
        content, opening, rest = text.partition(OPENING)
        if opening:
            return content.rstrip(), _calls(rest)
        certain = len(text) - longest_start(text, [OPENING])
        return (text if whole else text[:certain].rstrip()), []
    start = text.lstrip().removeprefix(PYTHON_TAG).lstrip()
    if start.startswith("{"):
        return "", _calls(start)
    held = not whole and (not start or PYTHON_TAG.startswith(start))
    return ("" if held else text), []


def reason_of(reason: str | None, calls: Sequence[ToolCall], choice: str) -> str | None:
    """Return the finish reason for clients: ``tool_calls`` if there are calls and none was cut."""
    whole = bool(calls) and all(call.whole for call in calls)
    return "tool_calls" if whole and reason == "stop" and not choice.startswith("=") else reason


def _calls(text: str) -> list[ToolCall]:
    """Return every call in a text, the last one as far as it has come."""
    calls, at = [], 0
    while head := HEAD.search(text, at):
        end = _end(text, head.end())
        at = len(text) if end is None else end
        calls.append(ToolCall(head[1], text[head.end() : at], end is not None))
    return calls


def _end(text: str, start: int) -> int | None:
    """Return the end of the JSON object that begins at ``start``; None if it is incomplete."""
    depth = 0
    for part in PARTS.finditer(text, start):
        depth += part[0] in "{["
        if part[0] in "}]":
            depth -= 1
            if depth == 0:
                return part.end()
    return None
