"""The body of ``/v1/responses``, and the chat that it asks for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ...base.limits import LARGEST_INT
from ...errors import shown
from .. import shapes
from ..errors import Refusal
from ..protocol import ChatRequest, Effort, Other, Wire, checked, ranged, with_effort
from ..shapes import MOST_MESSAGES, MOST_TOOLS, Real, Whole
from ..unsupported import Unless

LOGPROBS = "message.output_text.logprobs"
"""The entry of ``include`` that asks for log probabilities."""
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""Entries of ``include``; thoughts are not encrypted, so the second one adds nothing."""
Items = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_MESSAGES)]


class Format(Wire):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(Wire):
    """Options of the text."""

    format: Format | None = None
    verbosity: Annotated[Any, Unless(("medium",))] = None


class Reasoning(Wire):
    """Options of thoughts. No summary of them is made."""

    effort: Effort | None = None
    summary: str | None = None


class StreamOptions(Wire):
    """Options of a stream; nothing is obfuscated here."""

    include_obfuscation: bool = False


class ResponsesRequest(Other):
    """The body of ``POST /v1/responses``."""

    input: str | Items = ""
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Whole | None = ranged(1, LARGEST_INT)
    temperature: Real | None = None
    top_p: Real | None = None
    top_logprobs: Whole | None = ranged(0, 20)
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: Text | None = None
    reasoning: Reasoning | None = None
    include: shapes.Words | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    metadata: shapes.Metadata | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    enable_response_messages: bool = False
    background: Annotated[Any, Unless((False,), "ask for a stream instead")] = None
    conversation: Annotated[Any, Unless((), "give previous_response_id")] = None
    prompt: Annotated[Any, Unless((), "give input and instructions")] = None

    def chat(self, before: Sequence[dict[str, Any]]) -> ChatRequest:
        """Return the chat that continues the messages ``before``. Raises Refusal: not served."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        said = messages_of(self.input)
        if not (said or before):
            raise Refusal("input is empty; give a text, or a list of items.", "input")
        for entry in self.include or ():
            if entry not in INCLUDES:
                raise Refusal(
                    f"include has {shown(entry)}; give {' or '.join(INCLUDES)}.", "include"
                )
        named = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools_of(self.tools or []) or None,
            "tool_choice": None if self._calls_nothing else choice_of(self.tool_choice),
            "response_format": self._format(),
            "store": self.store,
        }
        fields = {name: value for name, value in named.items() if value is not None}
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        if LOGPROBS in (self.include or ()) or self.top_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return checked(
            ChatRequest,
            with_effort(self.passed, self.reasoning.effort if self.reasoning else None)
            | fields
            | {
                "messages": [*system, *before, *said],
                "stream": self.stream,
                "parallel_tool_calls": self.parallel_tool_calls,
            },
        )

    @property
    def _calls_nothing(self) -> bool:
        """True for the default choice without tools, which many clients send."""
        return self.tool_choice == "auto" and not self.tools

    def _format(self) -> dict[str, Any] | None:
        """Return OpenAI's ``response_format`` of chats."""
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "json_object"}
        schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        return {"type": "json_schema", "json_schema": schema}


def tools_of(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return functions as chats name them. Raises Refusal: a tool is no function."""
    found = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise Refusal(
                f"tools[{number}] is of type {shown(tool.get('type'))}; only functions are served, "
                "which the caller runs.", "tools",
            )  # fmt: skip
        if "name" not in tool:
            raise Refusal(
                f"tools[{number}] has no name; here, a function's fields are in the tool itself.",
                "tools",
            )
        found.append(
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        )
    return found


def choice_of(choice: str | dict[str, Any] | None) -> Any:
    """Return a choice of tools as chats name it. Raises Refusal: it names no function."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": kind, "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = choice.get("tools")
        listed = [choice_of(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": listed}}
    raise Refusal(
        f"tool_choice is of type {shown(kind)}; give none, auto, required or a function.",
        "tool_choice",
    )


def messages_of(given: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat messages that items stand for. Raises Refusal: one is not served.

    Thoughts and calls join the assistant's message next to them.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        kind = item.get("type", "message" if "role" in item else None)
        read = ITEMS.get(kind) if isinstance(kind, str) else None
        where = f"input[{number}]"
        if read is None:
            raise Refusal(
                f"{where} is of type {shown(kind)}; give messages, function calls, their outputs "
                "and reasoning.", "input",
            )  # fmt: skip
        read(messages, item, where)
    return [{"content": "", **message} for message in messages]


def _message(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise Refusal(f"{where} lacks role or content; give both.", "input")
    _check_parts(content, f"{where}.content")
    if role == "assistant":
        last = _assistant(messages)
        if "content" in last or "tool_calls" in last:
            last = _begin(messages)
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list):
        raise Refusal(f"{where}.content is not a list; give a list of texts.", "input")
    texts: list[Any] = [part.get("text") for part in parts if isinstance(part, dict)]
    if not any(texts):
        return  # they were left out
    last = messages[-1] if messages else {}
    if last.keys() != {"role", "reasoning"}:  # else it continues earlier thoughts
        last = _begin(messages)
    texts.insert(0, last.get("reasoning"))
    last["reasoning"] = "\n".join(text for text in texts if isinstance(text, str) and text)


def _call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    name, id, arguments = item.get("name"), item.get("call_id"), item.get("arguments", "{}")
    if not (isinstance(name, str) and isinstance(id, str) and isinstance(arguments, str)):
        raise Refusal(f"{where} lacks name, call_id or arguments; give all as texts.", "input")
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _output(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    id, output = item.get("call_id"), item.get("output")
    if not isinstance(id, str) or not isinstance(output, str | list):
        raise Refusal(f"{where} lacks call_id or output; give both.", "input")
    _check_parts(output, f"{where}.output")
    messages.append({"role": "tool", "tool_call_id": id, "content": output})


def _check_parts(content: str | list[Any], where: str) -> None:
    """Refuse parts that are not text."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise Refusal(
                f"{where} has a part of type {shown(kind)}; only text is served.", "input"
            )


def _begin(messages: list[dict[str, Any]]) -> dict[str, Any]:
    messages.append({"role": "assistant"})
    return messages[-1]


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end; append one if there is none."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[-1]
    return _begin(messages)


ITEMS: Mapping[str, Callable[[list[dict[str, Any]], Mapping[str, Any], str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
}
