"""Reads the calls of tools that a model wrote, in each of the forms of ``calls.Form``."""

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .calls import MARKS, OPENING, PYTHON_TAG, Form
from .stop import longest_start

HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
"""The text before the arguments of a call in JSON."""
KEYS = ("arguments", "parameters")
BARE = '{"name":"'
"""The beginning of a call in JSON, without space."""
FENCES = ("```json\n", "```\n")
BARE_STARTS = re.compile(r"\A\s*(?=\{)|```(?:json)?\s*\n\s*(?=\{|\Z)")
"""Where JSON begins that may be a call without marks."""
MISTRAL_HEAD = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
PARTS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]')
"""Strings, which may hold brackets, and brackets."""
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

Types = Mapping[str, Mapping[str, Any]]
"""The schemas of each tool's arguments, by its name and theirs."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model writes; ``arguments`` is the JSON so far, until it is ``whole``."""

    name: str
    arguments: str
    whole: bool = field(default=True, compare=False)
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return the call as clients of chat completions see it."""
        return {
            "id": self.id, "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }  # fmt: skip


def read_auto(
    text: str, form: Form, whole: bool, types: Types | None = None
) -> tuple[str, list[ToolCall]]:
    """Return the content and the calls of an output; only the certain part unless ``whole``."""
    if form == "llama3":
        return _of_llama(text, whole)
    if form == "pythonic":
        return _of_python(text, whole)
    if form == "openai":
        return text, []  # its calls are on channels, see ``reasoning.Channels``
    opening = MARKS[form][0]
    content, mark, rest = text.partition(opening)
    if mark:
        return content.rstrip(), READERS[form](mark + rest, types or {})
    if form == "hermes" and types:
        return _of_hermes_unmarked(text, whole, types)
    certain = len(text) - longest_start(text, [opening])
    return (text if whole else text[:certain].rstrip()), []


def read_json(text: str, head: re.Pattern[str] = HEAD) -> list[ToolCall]:
    """Return every call in a text, the last one as far as it has come."""
    calls, at = [], 0
    while found := head.search(text, at):
        end = json_end(text, found.end())
        at = len(text) if end is None else end
        calls.append(ToolCall(found[1], text[found.end() : at], end is not None))
    return calls


def json_end(text: str, start: int = 0) -> int | None:
    """Return the end of the JSON object that begins at ``start``; None if it is incomplete."""
    depth = 0
    for part in PARTS.finditer(text, start):
        depth += part[0] in "{["
        if part[0] in "}]":
            depth -= 1
            if depth == 0:
                return part.end()
    return None


def _of_hermes_unmarked(text: str, whole: bool, types: Types) -> tuple[str, list[ToolCall]]:
    """Return content and calls of an output without Hermes' marks, which small models forget.

    JSON is a call if it has the form of one and names a known tool, where the output begins with it
    or a block of code does.
    """
    for start in BARE_STARTS.finditer(text):
        calls = _bare(text[start.end() :], whole, types)
        if calls is not None:
            return text[: start.start()].rstrip(), calls
    held = [] if whole else [OPENING, *FENCES]
    certain = len(text) - (longest_start(text, held) if held else 0)
    return (text if whole else text[:certain].rstrip()), []


def _bare(text: str, whole: bool, types: Types) -> list[ToolCall] | None:
    """Return the calls that JSON begins with, [] while it may become one; None where it is none."""
    calls = read_json(text)
    if calls:
        return calls if all(call.name in types for call in calls) else None
    compact = re.sub(r"\s+", "", text)
    name, closed, rest = compact.removeprefix(BARE).partition('"')
    if not compact.startswith(BARE):
        may = BARE.startswith(compact)
    elif not closed:
        may = any(known.startswith(name) for known in types)
    else:
        may = name in types and any(f',"{key}":'.startswith(rest) for key in KEYS)
    return [] if may and not whole else None


def _of_llama(text: str, whole: bool) -> tuple[str, list[ToolCall]]:
    start = text.lstrip().removeprefix(PYTHON_TAG).lstrip()
    if start.startswith("{"):
        return "", read_json(start)
    held = not whole and (not start or PYTHON_TAG.startswith(start))
    return ("" if held else text), []


def _of_mistral(text: str, types: Types) -> list[ToolCall]:
    """A list of objects with name and arguments, or a mark, a name and an object for each call."""
    return read_json(text, MISTRAL_HEAD) or read_json(text)


def _of_python(text: str, whole: bool) -> tuple[str, list[ToolCall]]:
    """The whole output is a Python list of calls, or none of it."""
    start = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>")
    calls = python_calls(start)
    if calls:
        return "", calls
    held = not whole and (
        not start or start.startswith("[") or "<|python_start|>".startswith(start)
    )
    return ("" if held else text), []


def python_calls(text: str) -> list[ToolCall]:
    """Return the calls of a Python list such as ``[f(a=1)]``; none of another text."""
    try:
        (line,) = ast.parse(text.strip(), mode="exec").body
        listed = line.value if isinstance(line, ast.Expr) else None
        calls = listed.elts if isinstance(listed, ast.List) else []
        return [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []


def _python_call(node: ast.expr) -> ToolCall:
    """Return a call with literal arguments by name. Raises ValueError: it is no such call."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    values = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    if any(each.arg is None for each in node.keywords):
        raise ValueError
    return ToolCall(ast.unparse(node.func), json.dumps(values, ensure_ascii=False))


def _of_lfm2(text: str, types: Types) -> list[ToolCall]:
    opening, closing = MARKS["lfm2"]
    return [
        call
        for part in text.split(opening)[1:]
        for call in python_calls(part.partition(closing)[0])
    ]


def _of_xml(text: str, types: Types) -> list[ToolCall]:
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>``; schemas tell the types."""
    found = FUNCTION.findall(text)
    return (
        [
            ToolCall(name.strip(), json.dumps(_arguments(body, types.get(name.strip(), {}))))
            for name, body, end in found
            if end
        ]
        if found
        else read_json(text)
    )


def _arguments(body: str, types: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _value(text, types.get(key)) for key, text in PARAMETER.findall(body)}


def _value(text: str, schema: Any) -> Any:
    """Return a text as it is where its schema says so, else the JSON value that it is."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if "string" in (kinds if isinstance(kinds, list) else [kinds]):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


READERS: Mapping[Form, Callable[[str, Types], list[ToolCall]]] = {
    "hermes": lambda text, _: read_json(text),
    "granite": lambda text, _: read_json(text),
    "mistral": _of_mistral,
    "qwen3_coder": _of_xml,
    "lfm2": _of_lfm2,
}


def types_of(tools: Sequence[Mapping[str, Any]]) -> Types:
    """Return the schemas of arguments of functions with ``name`` and ``parameters``."""
    found = {tool["name"]: (tool.get("parameters") or {}).get("properties") for tool in tools}
    return {name: each if isinstance(each, dict) else {} for name, each in found.items()}
