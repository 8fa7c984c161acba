"""Fields of OpenAI's and vLLM's requests that this server does not honour.

A field that would change the prompt or the output is refused, unless its value asks for nothing.
Fields that change neither are ignored, and so is every field that neither API knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

IGNORED = (
    "guided_decoding_backend", "media_io_kwargs", "metadata", "prompt_cache_key",
    "prompt_cache_retention", "return_mm_kwargs", "return_token_offsets", "safety_identifier",
    "service_tier", "session_id", "store", "stream_interval", "user",
)  # fmt: skip
"""Fields that change neither the prompt nor the output."""


@dataclass(frozen=True)
class Unless:
    """Refuses every value of a field but null and the ``neutral`` ones, which ask for nothing."""

    neutral: tuple[Any, ...] = ()
    remedy: str = "leave it out"

    def check(self, value: Any) -> None:
        """Accept a value that asks for nothing.

        Raises:
            ValueError: the value asks for something.
        """
        if value is not None and not any(value == one for one in self.neutral):
            raise ValueError(f"this server does not support it; {self.remedy}")

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, __: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self.neutral]}


TEMPLATE = "give chat_template_kwargs if the chat template has such a switch"
CHATS = "send the call to /v1/chat/completions, or leave it out"
COMPLETIONS = "send the call to /v1/completions, or leave it out"
TOOLS = "give tools and tool_choice"
BLANKS = "set it in the schema's x-guidance"


class Unsupported(BaseModel):
    """Fields that neither endpoint honours."""

    use_beam_search: Annotated[Any, Unless((False,))] = None
    early_stopping: Annotated[Any, Unless((False,))] = None
    length_penalty: Annotated[Any, Unless((1,))] = None
    suffix: Annotated[Any, Unless(("",))] = None
    watermarking: Annotated[Any, Unless((False,))] = None
    repetition_detection: Annotated[Any, Unless()] = None
    thinking_token_budget: Annotated[Any, Unless((-1,))] = None
    include_reasoning: Annotated[Any, Unless((True,))] = None
    thinking: Annotated[Any, Unless((), TEMPLATE)] = None
    reasoning: Annotated[Any, Unless((), TEMPLATE)] = None
    enable_thinking: Annotated[Any, Unless((), TEMPLATE)] = None
    thinking_budget: Annotated[Any, Unless((), TEMPLATE)] = None
    verbosity: Annotated[Any, Unless(("medium",))] = None
    functions: Annotated[Any, Unless(([],), TOOLS)] = None
    function_call: Annotated[Any, Unless(("none",), TOOLS)] = None
    modalities: Annotated[Any, Unless((["text"],))] = None
    audio: Annotated[Any, Unless()] = None
    web_search_options: Annotated[Any, Unless()] = None
    mm_processor_kwargs: Annotated[Any, Unless(({},))] = None
    prompt_embeds: Annotated[Any, Unless(([],))] = None
    logits_processors: Annotated[Any, Unless(([],), "pass them to LLM.generate in Python")] = None
    logprob_token_ids: Annotated[Any, Unless(([],))] = None
    return_tokens_as_token_ids: Annotated[Any, Unless((False,), "give return_token_ids")] = None
    return_prompt_text: Annotated[Any, Unless((False,))] = None
    routed_experts_prompt_start: Annotated[Any, Unless((0,))] = None
    detokenize: Annotated[Any, Unless((True,), "give return_token_ids")] = None
    spaces_between_special_tokens: Annotated[Any, Unless((True,))] = None
    structural_tag: Annotated[Any, Unless()] = None
    guided_whitespace_pattern: Annotated[Any, Unless((), BLANKS)] = None
    kv_transfer_params: Annotated[Any, Unless(({},))] = None
    ec_transfer_params: Annotated[Any, Unless(({},))] = None
    vllm_xargs: Annotated[Any, Unless(({},))] = None
    chat_template: Annotated[Any, Unless((), "the operator chooses the template")] = None


class NotInChats(BaseModel):
    """Fields that only completions honour."""

    prompt: Annotated[Any, Unless((), COMPLETIONS)] = None
    echo: Annotated[Any, Unless((False,), COMPLETIONS)] = None
    best_of: Annotated[Any, Unless((1,), "give n")] = None
    add_special_tokens: Annotated[Any, Unless((False,), "the chat template adds them")] = None


class NotInCompletions(BaseModel):
    """Fields that only chats honour."""

    messages: Annotated[Any, Unless((), CHATS)] = None
    tools: Annotated[Any, Unless(([],), CHATS)] = None
    tool_choice: Annotated[Any, Unless(("none", "auto"), CHATS)] = None
    parallel_tool_calls: Annotated[Any, Unless((True, False), CHATS)] = None
    top_logprobs: Annotated[Any, Unless((0,), "give logprobs")] = None
    add_generation_prompt: Annotated[Any, Unless((True, False), CHATS)] = None
    continue_final_message: Annotated[Any, Unless((False,), CHATS)] = None
    documents: Annotated[Any, Unless(([],), CHATS)] = None
    reasoning_effort: Annotated[Any, Unless(("none",), CHATS)] = None
    chat_template_kwargs: Annotated[Any, Unless(({},), CHATS)] = None
