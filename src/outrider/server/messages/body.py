"""The body of ``/v1/messages``, and the chat that it asks for."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import to_json

from ...base.limits import LARGEST_INT
from ...errors import shown
from .. import shapes
from ..errors import Refusal
from ..protocol import (
    ChatRequest,
    Effort,
    Other,
    Wire,
    checked,
    ranged,
    with_effort,
    with_hints,
)
from ..shapes import MOST_MESSAGES, MOST_TOOLS, Parts, Real, Whole
from ..unsupported import Unless

NO_EDITS: tuple[Any, ...] = (
    {}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
)  # fmt: skip
"""Edits of the context that leave it as it is."""


class Thinking(Wire):
    """Whether thoughts are wanted, and how many tokens of them."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = ranged(0, LARGEST_INT)
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(Wire):
    """Which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(Wire):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    """Options of the output."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class Prompt(Other):
    """The part of a body that the prompt is made of; all of ``/v1/messages/count_tokens``."""

    generates: ClassVar[bool] = False
    model: str | None = None
    messages: Annotated[
        list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)
    ]
    system: str | Parts | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = (
        None
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: Annotated[Any, Unless(NO_EDITS)] = None
    mcp_servers: Annotated[Any, Unless(([],), "give tools")] = None
    container: Annotated[Any, Unless()] = None

    def chat(self) -> ChatRequest:
        """Return the chat that the body asks for. Raises Refusal: a part is not served."""
        return checked(ChatRequest, self._fields())

    def _fields(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system")})
        for number, message in enumerate(self.messages):
            messages += messages_of(message, f"messages[{number}]")
        last = messages[-1]
        if last["role"] == "assistant" and "tool_calls" not in last:
            more = {"continue_final_message": True}  # as in Anthropic's API
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        if form is not None:
            schema = {"name": "output", "schema": form.schema_}
            more["response_format"] = {"type": "json_schema", "json_schema": schema}
        passed = with_effort(self.passed, config.effort)
        if self.thinking is not None:
            wanted = self.thinking.type != "disabled"
            passed = with_hints(passed, {"enable_thinking": wanted, "thinking": wanted})
            if self.thinking.type == "enabled" and self.thinking.budget_tokens is not None:
                more["thinking_token_budget"] = self.thinking.budget_tokens
            if self.thinking.display == "omitted":
                more["include_reasoning"] = False
        return passed | more | {
            "model": self.model, "messages": messages, "tools": tools_of(self.tools or []) or None,
            **self._of_choice(),
        }  # fmt: skip

    def _of_choice(self) -> dict[str, Any]:
        choice = self.tool_choice
        if choice is None:
            return {}
        how: Any = {"any": "required"}.get(choice.type, choice.type)
        if choice.type == "tool":
            how = {"type": "function", "function": {"name": choice.name}}
        return {"tool_choice": how, "parallel_tool_calls": not choice.disable_parallel_tool_use}


class MessagesRequest(Prompt):
    """The body of ``POST /v1/messages``."""

    generates: ClassVar[bool] = True
    max_tokens: Whole = Field(json_schema_extra={"minimum": 1, "maximum": LARGEST_INT})
    temperature: Real | None = None
    top_p: Real | None = None
    stop_sequences: shapes.Words | None = None
    stream: bool = False
    metadata: dict[str, Any] | None = None

    def _fields(self) -> dict[str, Any]:
        named = {"temperature": self.temperature, "top_p": self.top_p, "stop": self.stop_sequences}
        fields = {name: value for name, value in named.items() if value is not None}
        own = {"max_completion_tokens": self.max_tokens, "stream": self.stream}
        return super()._fields() | fields | own


def _text(content: Any, where: str) -> str:
    """Return the text of a content that has text blocks only. Raises Refusal: it has others."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, dict) else None
        text = block.get("text") if kind == "text" else None
        if not isinstance(text, str):
            what = " without its text; give that" if kind == "text" else "; only text is served"
            raise Refusal(
                f"{where} has a block of type {shown(kind)}{what}.",
                where.partition("[")[0],
            )
        texts.append(text)
    return "\n".join(texts)


def messages_of(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the chat messages that a message stands for; each tool result becomes its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system") or not isinstance(content, str | list):
        raise Refusal(
            f"{where} lacks a role, user or assistant, or content; give both.", "messages"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    said: dict[str, Any] = {"role": role, "content": []}
    found: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            found.append(_result(block, place))
        elif kind == "tool_use" and role == "assistant":
            said.setdefault("tool_calls", []).append(_call(block, place))
        elif kind == "thinking" and role == "assistant":
            thoughts = block.get("thinking")
            if not isinstance(thoughts, str):
                raise Refusal(f"{place}.thinking is {shown(thoughts)}; give a text.", "messages")
            said["reasoning"] = said.get("reasoning", "") + thoughts
        elif kind != "redacted_thinking" or role != "assistant":
            said["content"].append({"type": "text", "text": _text([block], place)})
    if said["content"] or "tool_calls" in said or not found:
        found.append(said)
    return found


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    # Clients of SGLang write id.
    id, content = block.get("tool_use_id", block.get("id")), block.get("content") or ""
    if not (isinstance(id, str) and id):
        raise Refusal(f"{where} has no tool_use_id; give one.", "messages")
    text = _text(content, where)
    if block.get("is_error") is True:
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": id, "content": text}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    id, name, given = block.get("id"), block.get("name"), block.get("input", {})
    named = all(isinstance(each, str) and each for each in (id, name))
    if not (named and isinstance(given, dict)):
        raise Refusal(f"{where} lacks id, name or input; give all.", "messages")
    function = {"name": name, "arguments": to_json(given).decode()}
    return {"id": id, "type": "function", "function": function}


def tools_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as chats name them. Raises Refusal: one is run by Anthropic's servers."""
    found = []
    for number, tool in enumerate(tools):
        if tool.get("type", "custom") not in ("custom", None):
            raise Refusal(
                f"tools[{number}] is of type {shown(tool['type'])}; only tools that the caller "
                "runs are served.", "tools",
            )  # fmt: skip
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        found.append({"type": "function", "function": function})
    return found
