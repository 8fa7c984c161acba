"""Reads the tool calls that a model wrote, in each of the forms of ``calls.Form``.

Text that begins like a call but is none stays text. Text after a call is left out. As a text grows,
the parts read from it only grow, so that streams and whole answers agree.
"""

import ast
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .calls import MARKS, PYTHON_TAG, Form
from .stop import longest_start

HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""The text before the arguments of a call in JSON."""
KEYS = ("arguments", "parameters")
BEGIN = re.compile(r"\s*\[?\s*")
"""The text before the first call in JSON."""
BETWEEN = re.compile(r"(?:[\s,;\]]|</?tool_call>|<\|tool_call\|>)*\[?\s*")
"""The text between two calls in JSON."""
CLOSING_BRACE = re.compile(r"\s*\}")
MISTRAL_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
MISTRAL_START = re.compile(r"\s*[\w.-]+(?:\[CALL_ID\][\w-]*)?(?:\[[A-Z_\]]*)?\s*\Z")
PARTS = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]', re.DOTALL)
"""Strings of JSON, which may hold brackets, and brackets."""
PYTHON_PARTS = re.compile(r""""(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|[{}\[\]()]""", re.DOTALL)
XML_HEAD = "<function="
FENCES = ("```json", "```")
"""Lines that may stand before a call whose marks were forgotten."""
LONGEST_PYTHON = 1 << 16
"""Most characters of a list of calls that are given to Python's parser."""
MOST_MARKS = 16
"""Most marks without a call in an output; after them all is text.

Each costs a pass over the rest, and a model that repeats itself writes thousands.
"""

Types = Mapping[str, Mapping[str, Any]]
"""The schemas of each tool's arguments, by its name and theirs."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model writes; ``arguments`` is the JSON so far, until it is ``whole``."""

    name: str
    arguments: str
    whole: bool = field(default=True, compare=False)

    def as_json(self, id: str) -> dict[str, Any]:
        """Return the call as clients of chat completions see it."""
        return {
            "id": id, "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }  # fmt: skip


def new_id() -> str:
    """Return an id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


Calls = list[ToolCall] | None
"""Calls: empty if some may still come, None if there are none."""


def read_auto(
    text: str, form: Form, whole: bool, types: Types | None = None
) -> tuple[str, list[ToolCall]]:
    """Return the content and the calls of an output; only the certain part unless ``whole``."""
    if form == "openai":
        return text, []  # its calls are on channels, see ``reasoning.Channels``
    if form in ("llama3", "pythonic"):
        read = _of_llama if form == "llama3" else _of_python
        calls = read(text)
        return ("", calls) if calls or (calls is not None and not whole) else (text, [])
    if form == "hermes" and types:
        calls = _without_marks(text, types)
        if calls or (calls is not None and not whole):
            return "", calls
    opening, at = MARKS[form][0], 0
    for _ in range(MOST_MARKS):
        place = text.find(opening, at)
        if place < 0:
            break
        at = place + len(opening)
        calls = READERS[form](text[at:], types or {})
        if calls or (calls is not None and not whole):
            return text[:place].rstrip(), calls
        # It is no call: the mark is text.
    certain = len(text) - longest_start(text, [opening])
    return (text if whole else text[:certain].rstrip()), []


def read_json(text: str) -> list[ToolCall]:
    """Return the calls in JSON that begin a text, one after the other; the last may be partial."""
    calls: list[ToolCall] = []
    at = _skipped(BEGIN, text, 0)
    while head := HEAD.match(text, at):
        end = json_end(text, head.end())
        calls.append(ToolCall(head[1], text[head.end() : end], end is not None))
        if end is None:
            break
        at = _skipped(BETWEEN, text, _skipped(CLOSING_BRACE, text, end))
    return calls


def _skipped(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a pattern's match at a place; the same place if it does not match."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def json_end(text: str, start: int = 0) -> int | None:
    """Return the end of the JSON object or list that begins there; None if it is incomplete."""
    return _end(text, start, PARTS)


def _end(text: str, start: int, parts: re.Pattern[str]) -> int | None:
    depth = 0
    for part in parts.finditer(text, start):
        depth += part[0] in "{[("
        if part[0] in "}])":
            depth -= 1
            if depth == 0:
                return part.end()
    return None


def _may_begin(text: str, names: Sequence[str] | None = None) -> bool:
    """Return whether a text may become a call in JSON, of one of ``names`` if they are known."""
    compact = re.sub(r"\s+", "", text[:LONGEST_PYTHON]).removeprefix("[")
    begin = '{"name":"'
    if not compact.startswith(begin):
        return begin.startswith(compact)
    name, closed, rest = compact.removeprefix(begin).partition('"')
    if not closed:
        return names is None or any(known.startswith(name) for known in names)
    known = names is None or name in names
    return known and any(f',"{key}":'.startswith(rest) for key in KEYS)


def _object_calls(text: str) -> Calls:
    """Return the calls of JSON that begins a text, with its keys in any order."""
    calls = read_json(text)
    if calls:
        return calls
    start = text.lstrip()
    if not start or start[0] not in "{[":
        return None if start else []
    end = json_end(start)
    if end is None:
        return []
    try:
        value = json.loads(start[:end], parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return [call for each in (value if isinstance(value, list) else [value])
            if (call := _of_object(each)) is not None] or None  # fmt: skip


def _of_object(value: Any) -> ToolCall | None:
    """Return the call that an object describes; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given: Any = next((value[key] for key in KEYS if value.get(key) is not None), {})
    if isinstance(given, str):
        try:
            given = json.loads(given, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
    return ToolCall(value["name"], json.dumps(given)) if isinstance(given, dict) else None


def _without_marks(text: str, types: Types) -> Calls:
    """Return the calls of an output that begins with them, though without Hermes' marks.

    Small models forget the marks. JSON is a call if it has the form of one and names a known tool,
    at the very beginning or in a block of code there.
    """
    start = text.lstrip()
    if start.startswith("`"):
        line, ended, start = start.partition("\n")
        if not ended:
            return [] if any(fence.startswith(line.rstrip()) for fence in FENCES) else None
        if line.rstrip() not in FENCES:
            return None
        start = start.lstrip()
    if start and not start.startswith("{"):
        return None
    known = []
    for call in read_json(start):
        if call.name not in types:
            break
        known.append(call)
    return known or ([] if _may_begin(start, [*types]) else None)


def _of_llama(text: str) -> Calls:
    start = text.lstrip()
    if PYTHON_TAG.startswith(start):
        return []
    start = start.removeprefix(PYTHON_TAG).lstrip()
    return read_json(start) or ([] if _may_begin(start) else None)


def _of_json(text: str, types: Types) -> Calls:
    return _object_calls(text)


def _of_mistral(text: str, types: Types) -> Calls:
    """A list of objects with name and arguments, or a mark, a name and an object for each call."""
    opening, calls, at = MARKS["mistral"][0], list[ToolCall](), 0
    while found := MISTRAL_HEAD.match(text, at):
        end = json_end(text, found.end())
        calls.append(ToolCall(found[1], text[found.end() : end], end is not None))
        if end is None or not text.startswith(opening, end):
            break
        at = end + len(opening)
    if calls:
        return calls
    return [] if MISTRAL_START.match(text) else _object_calls(text)


def _of_python(text: str) -> Calls:
    """The output begins with a Python list of calls."""
    opening, _ = MARKS["pythonic"]
    start = text.lstrip()
    if opening.startswith(start):
        return []
    return python_calls(start.removeprefix(opening).lstrip())


def python_calls(text: str) -> Calls:
    """Return the calls of a Python list such as ``[f(a=1)]`` that begins a text."""
    if not text.startswith("["):
        return None if text else []
    end = _end(text, 0, PYTHON_PARTS)
    if end is None:
        return [] if len(text) < LONGEST_PYTHON else None
    try:
        (line,) = ast.parse(text[:end]).body
        listed = line.value if isinstance(line, ast.Expr) else None
        calls = listed.elts if isinstance(listed, ast.List) else []
        return [_python_call(call) for call in calls] or None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _python_call(node: ast.expr) -> ToolCall:
    """Return a call with literal arguments by name. Raises ValueError: it is no such call."""
    if (
        not isinstance(node, ast.Call)
        or node.args
        or any(each.arg is None for each in node.keywords)
    ):
        raise ValueError
    values = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    return ToolCall(ast.unparse(node.func), json.dumps(values, allow_nan=False))


def _of_lfm2(text: str, types: Types) -> Calls:
    """Lists between marks; some models write JSON there."""
    opening, closing = MARKS["lfm2"]
    inside = text.lstrip()
    if inside.startswith("{"):
        return _object_calls(inside)
    first = python_calls(inside)
    calls, more = [*(first or [])], first
    while more:
        rest = inside[_end(inside, 0, PYTHON_PARTS) :].lstrip().removeprefix(closing).lstrip()
        inside = rest.removeprefix(opening).lstrip()
        more = python_calls(inside) if rest.startswith(opening) else None
        calls += more or []
    return calls or first


def _of_xml(text: str, types: Types) -> Calls:
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>``; schemas give the types."""
    inside = text.lstrip()
    if inside and not (inside.startswith(XML_HEAD) or XML_HEAD.startswith(inside)):
        return _object_calls(inside)
    calls = []
    for name, body in _elements(text, "function"):
        named = {key: _value(value, types.get(name.strip(), {}).get(key))
                 for key, value in _elements(body, "parameter")}  # fmt: skip
        calls.append(ToolCall(name.strip(), json.dumps(named)))
    return calls


def _elements(text: str, tag: str) -> Iterator[tuple[str, str]]:
    """Yield the names and bodies of ``<TAG=NAME>BODY</TAG>``, in time linear in the text."""
    head, closing, at = re.compile(rf"<{tag}=([^<>\n]+)>"), f"</{tag}>", 0
    while (found := head.search(text, at)) and (end := text.find(closing, found.end())) >= 0:
        yield found[1], text[found.end() : end].removeprefix("\n").removesuffix("\n")
        at = end + len(closing)


def _value(text: str, schema: Any) -> Any:
    """Return a text as it is if its schema has strings, else its JSON value."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if "string" in (kinds if isinstance(kinds, list) else [kinds]):
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


READERS: Mapping[Form, Callable[[str, Types], Calls]] = {
    "hermes": _of_json,
    "granite": _of_json,
    "mistral": _of_mistral,
    "qwen3_coder": _of_xml,
    "lfm2": _of_lfm2,
}
"""Readers of the text after a mark that opens calls."""


def types_of(tools: Sequence[Mapping[str, Any]]) -> Types:
    """Return the schemas of arguments of functions with ``name`` and ``parameters``."""
    found = {tool["name"]: (tool.get("parameters") or {}).get("properties") for tool in tools}
    return {name: each if isinstance(each, dict) else {} for name, each in found.items()}
