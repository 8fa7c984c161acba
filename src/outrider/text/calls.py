"""Writes tools and calls as text, for models whose chat template does not print them.

There are two forms: Hermes' (``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, Qwen's
as well) and Llama 3's (``{"name": ..., "parameters": {...}}``, several parted by semicolons).
"""

import json
from typing import Any, Literal

Form = Literal["hermes", "llama3"]
OPENING, CLOSING = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
HOW: dict[Form, str] = {
    "hermes": (
        "To call a function, answer with a JSON object of its name and its arguments between "
        f'{OPENING} tags:\n{OPENING}\n{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}\n'
        f"{CLOSING}"
    ),
    "llama3": (
        "To call a function, answer with a JSON object of its name and its parameters, and with "
        'nothing else:\n{"name": "NAME", "parameters": {"PARAMETER": "VALUE"}}'
    ),
}


def form_of(template: str | None) -> Form:
    """Return the form in which a model with this chat template writes calls."""
    return "llama3" if template and PYTHON_TAG in template else "hermes"


def tool_prompt(tools: list[Any], form: Form) -> str:
    """Return a prompt that describes ``tools`` and how to call them."""
    listed = "\n".join(_json(tool) for tool in tools)
    return (
        "You can call functions to help the user. Here they are, between <tools> tags:\n<tools>\n"
        f"{listed}\n</tools>\n\n{HOW[form]}"
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
