"""Forms of calls, and how tools and calls are written for templates that do not print them.

Two forms are written: Hermes' (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, also
Qwen's) and Llama 3's (``{"name": ..., "parameters": {...}}``, separated by semicolons). Templates
with another form print calls themselves.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

Form = Literal[
    "hermes", "llama3", "pythonic", "mistral", "granite", "qwen3_coder", "lfm2", "openai"
]  # fmt: skip
OPENING, CLOSING = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MARKS: Mapping[Form, tuple[str, ...]] = {
    "hermes": (OPENING, CLOSING),
    "llama3": (PYTHON_TAG,),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "granite": ("<|tool_call|>",),
    "qwen3_coder": (OPENING, CLOSING),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "openai": (),
}
"""Texts that mark calls, the opening one first; often they are special tokens."""
IN_TEMPLATES: Mapping[str, Form] = {
    PYTHON_TAG: "llama3",
    "<|python_start|>": "pythonic",
    "[TOOL_CALLS]": "mistral",
    "<|tool_call|>": "granite",
    "<|tool_call_start|>": "lfm2",
    "<function=": "qwen3_coder",
    "<|channel|>": "openai",
}
"""Texts in templates that identify a form; without any it is Hermes'."""
_HERMES = (
    "To call a function, answer with a JSON object of its name and its arguments between "
    f'{OPENING} tags:\n{OPENING}\n{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}\n'
    f"{CLOSING}"
)
_LLAMA = (
    "To call a function, answer with a JSON object of its name and its parameters, and with "
    'nothing else:\n{"name": "NAME", "parameters": {"PARAMETER": "VALUE"}}'
)


def form_of(template: str | None) -> Form:
    """Return the form in which a model with this chat template writes calls."""
    return next((form for mark, form in IN_TEMPLATES.items() if mark in (template or "")), "hermes")


def tool_prompt(tools: list[Any], form: Form) -> str:
    """Return a prompt that describes ``tools`` and how to call them."""
    listed = "\n".join(_json(tool) for tool in tools)
    return (
        "You can call functions to help the user. Here they are, between <tools> tags:\n<tools>\n"
        f"{listed}\n</tools>\n\n{_LLAMA if form == 'llama3' else _HERMES}"
    )


def written_calls(calls: list[Any], form: Form) -> str:
    """Return the text of calls, in the form in which the model writes them."""
    if form == "llama3":
        return "; ".join(_written(call, "parameters") for call in calls)
    return "\n".join(f"{OPENING}\n{_written(call, 'arguments')}\n{CLOSING}" for call in calls)


def _written(call: Any, key: str) -> str:
    name, value = _json(call["function"]["name"]), call["function"]["arguments"]
    return f'{{"name": {name}, "{key}": {value if isinstance(value, str) else _json(value)}}}'


def written_result(content: str) -> str:
    """Return the text of a call's result."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
