"""Tools: their check, and the grammar of calls.

A grammar holds calls to their form (see ``text/calls.py``) and arguments to their schemas, so that
they can be read while they are generated.
"""

import json
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from ..errors import shown
from ..params import LARGEST_GRAMMAR
from ..sampling.schemas import BLANKS, opened
from ..text.called import ToolCall
from ..text.calls import CLOSING, OPENING, PYTHON_TAG, Form
from .errors import Refusal
from .protocol import AllowedTools, ChatRequest, NamedTool, Tool
from .shapes import check_schema

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": False}
SAY_NOTHING = ("type", "$schema", "$defs", "definitions", "title", "description")
"""Keywords of a schema that name no argument."""
FORMS_HELD: frozenset[Form] = frozenset(("hermes", "llama3"))
"""Forms of calls beside free text that a grammar enforces; other forms are only parsed."""


def check_tools(tools: Sequence[Tool]) -> None:
    """Refuse schemas that are too large or too deep, alone or together."""
    size = sum(check_schema(tool.function.parameters or {}, "tools") for tool in tools)
    if size > LARGEST_GRAMMAR:
        raise Refusal(
            f"the schemas of all tools have {size} characters; give at most {LARGEST_GRAMMAR}.",
            "tools",
        )


class Choice(NamedTuple):
    """A choice of tools: ``how`` is none, auto, required, or the one tool "=name".

    ``allowed`` has the tools that may be called.
    """

    how: str
    allowed: Sequence[Tool]


def choice_of(body: ChatRequest) -> Choice:
    """Return a body's tool choice, checked against its tools. Raises Refusal: it is wrong."""
    tools, choice = body.tools or [], body.tool_choice
    check_tools(tools)
    if isinstance(choice, NamedTool):
        _named(choice.function.name, tools)
        return Choice(f"={choice.function.name}", tools)
    if isinstance(choice, AllowedTools):
        names = [each.function.name for each in choice.allowed_tools.tools]
        allowed = [_named(name, tools) for name in dict.fromkeys(names)]
        return Choice(choice.allowed_tools.mode, allowed)
    if choice in ("auto", "required") and not tools:
        raise Refusal(f"tool_choice is {choice!r}, but there are no tools.", "tool_choice")
    return Choice(choice or ("auto" if tools else "none"), tools)


def _named(name: str, tools: Sequence[Tool]) -> Tool:
    """Return the tool that a choice names."""
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise Refusal(f"tool_choice names {shown(name)}, which is not among tools.", "tool_choice")


def constraint(
    choice: Choice,
    form: Form,
    special: Container[str],
    others: Sequence[int] = (),
    several: bool = True,
) -> dict[str, Any] | None:
    """Return the form of the output for ``StructuredOutputsParams``, None for any.

    With a named tool the output is its arguments, with "required" a list of calls, and with "auto"
    calls in the model's form and free text that may contain every token. ``special`` has the texts
    of special tokens, ``others`` the ids of those that neither mark calls nor end a text. Unless
    ``several`` there is one call at most.
    """
    how, tools = choice
    if how.startswith("="):
        return {"json": _parameters(_named(how[1:], tools))}
    if how == "none" or (how == "auto" and form not in FORMS_HELD):
        return None
    mark = f"<[{','.join(map(str, others))}]>" if others else ""
    if how == "required":
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


def reason_of(reason: str | None, calls: Sequence[ToolCall], how: str) -> str | None:
    """Return the finish reason for clients: ``tool_calls`` if there are calls and none was cut."""
    whole = bool(calls) and all(call.whole for call in calls)
    return "tool_calls" if whole and reason == "stop" and not how.startswith("=") else reason
