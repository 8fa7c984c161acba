"""Writes conversations with chat templates, and refuses what a template would leave out.

A template is first run with marks in place of contents, which shows what it leaves out. Tools,
calls and results that it does not print are written as text; anything else is refused.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from ..errors import RequestError, shown
from .calls import Form, tool_prompt, written_calls, written_result
from .template import render

Messages = list[dict[str, Any]]
MARK = "zqx{}xqz"
MARKS = re.compile(r"zqx(\d+)xqz")
DEVELOPER = re.compile(r"""["']developer["']""")


def write(
    templates: Sequence[str],
    messages: Messages,
    tools: list[Any],
    form: Form,
    variables: dict[str, Any],
) -> str:
    """Return the text of a conversation by the first template that leaves nothing out.

    ``messages`` come from ``messages.readable``; ``variables`` are those of ``template.render``.
    """
    if not any(map(DEVELOPER.search, templates)):
        roles = {"developer": "system"}
        messages = [{**m, "role": roles.get(m["role"], m["role"])} for m in messages]
    marked, marked_tools, places = _marked(messages, tools)
    trial = {name: v for name, v in variables.items() if name != "continue_final_message"}
    failures: list[tuple[int, RequestError]] = []
    try:
        for i, (said, listed) in enumerate(_ways(marked, marked_tools, form)):
            for template in templates:
                try:
                    text = render(template, said, tools=listed or None, **trial)
                except RequestError as error:
                    failures.append((len(places) + 1, error))
                    continue
                kept = {int(number) for number in MARKS.findall(text)}
                lost = [place for number, place in enumerate(places) if number not in kept]
                if not lost:
                    said, listed = next(islice(_ways(messages, tools, form), i, None))
                    return render(template, said, tools=listed or None, **variables)
                failures.append((len(lost), _left_out(lost[0], messages)))
    except RecursionError:
        raise RequestError(
            "the messages are nested too deeply; flatten them.", "messages"
        ) from None
    raise min(failures, key=itemgetter(0))[1]


def _left_out(place: str, messages: Messages) -> RequestError:
    """Return the error for a part that the chat template leaves out."""
    owner, _, rest = place.partition("[")
    remedy = "leave it out"
    if owner == "messages" and rest.removesuffix("]").isdecimal():
        place += f" (role {shown(messages[int(rest[:-1])]['role'])})"
        remedy = "give system, user or assistant, or leave it out"
    return RequestError(f"this model's chat template leaves out {place}; {remedy}.", owner)


def _marked(messages: Messages, tools: list[Any]) -> tuple[Messages, list[Any], list[str]]:
    """Return messages and tools with marks in place of contents, and the place of each mark."""
    places: list[str] = []

    def mark(place: str) -> str:
        places.append(place)
        return MARK.format(len(places) - 1)

    said = []
    for i, message in enumerate(messages):
        other = dict(message)
        if message["content"].strip():
            other["content"] = mark(f"messages[{i}]")
        if "tool_calls" in message:
            other["tool_calls"] = [
                _with_function(call, arguments=_like(call["function"]["arguments"], mark(place)))
                for j, call in enumerate(message["tool_calls"])
                for place in [f"messages[{i}].tool_calls[{j}]"]
            ]
        said.append(other)
    listed = [_with_function(tool, name=mark(f"tools[{i}]")) for i, tool in enumerate(tools)]
    return said, listed, places


def _with_function(owner: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**owner, "function": {**owner["function"], **values}}


def _like(arguments: Any, mark: str) -> Any:
    """Return arguments of the same type that hold a mark."""
    if isinstance(arguments, dict):
        return {mark: mark}
    return mark if isinstance(arguments, str) else [mark]


def _ways(messages: Messages, tools: list[Any], form: Form) -> Iterator[tuple[Messages, list[Any]]]:
    """Yield inputs for a template: the conversation as it is, then with more of it as text."""
    yield messages, tools
    if any("tool_calls" in message for message in messages):
        messages = [_with_calls_written(message, form) for message in messages]
        yield messages, tools
    if any(message["role"] == "tool" for message in messages):
        messages = _with_results_said(messages)
        yield messages, tools
    if tools:
        prompt = tool_prompt(tools, form)
        yield _with_prompt(messages, prompt), []
        yield _with_first_said(messages, prompt), []


def _with_calls_written(message: dict[str, Any], form: Form) -> dict[str, Any]:
    other = dict(message)
    calls = other.pop("tool_calls", None)
    if calls:
        other["content"] = "\n".join(filter(None, [message["content"], written_calls(calls, form)]))
    return other


def _with_results_said(messages: Messages) -> Messages:
    """Return messages with results of calls as user messages, consecutive ones joined."""
    said: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        content = written_result(message["content"]) if is_result else message["content"]
        if after_result and (is_result or message["role"] == "user"):
            said[-1]["content"] += f"\n{content}"
        else:
            said.append({"role": "user", "content": content} if is_result else message)
        after_result = is_result
    return said


def _with_prompt(messages: Messages, prompt: str) -> Messages:
    """Return messages that begin with a system message which ends with ``prompt``."""
    first, rest = messages[0], messages[1:]
    if first["role"] != "system":
        return [{"role": "system", "content": prompt}, *messages]
    return [{**first, "content": _joined(first["content"], prompt)}, *rest]


def _with_first_said(messages: Messages, prompt: str) -> Messages:
    """Return messages whose first user message begins with ``prompt``."""
    said = list(messages)
    first = next((i for i, message in enumerate(said) if message["role"] == "user"), None)
    if first is not None:
        said[first] = {**said[first], "content": _joined(prompt, said[first]["content"])}
    return said


def _joined(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))
