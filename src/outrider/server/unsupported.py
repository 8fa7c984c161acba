"""Fields of OpenAI's and vLLM's requests that this server does not honour.

A field that would change the prompt or the output is refused, unless its value changes nothing.
Fields that change neither are ignored, and so is every field that neither API knows.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
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
        """Refuse a value that asks for something.

        Raises ValueError: the value asks for something.
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


def _model(name: str, fields: dict[str, Unless]) -> Any:
    """Return a pydantic model with these fields."""
    return create_model(name, **{n: (Annotated[Any, mark], None) for n, mark in fields.items()})  # type: ignore[call-overload]


Unsupported = _model(
    "Unsupported",
    {
        "use_beam_search": Unless((False,)),
        "early_stopping": Unless((False,)),
        "length_penalty": Unless((1,)),
        "suffix": Unless(("",)),
        "watermarking": Unless((False,)),
        "repetition_detection": Unless(),
        "thinking_token_budget": Unless((-1,)),
        "include_reasoning": Unless((True,)),
        "thinking": Unless((), TEMPLATE),
        "reasoning": Unless((), TEMPLATE),
        "enable_thinking": Unless((), TEMPLATE),
        "thinking_budget": Unless((), TEMPLATE),
        "verbosity": Unless(("medium",)),
        "functions": Unless(([],), TOOLS),
        "function_call": Unless(("none",), TOOLS),
        "modalities": Unless((["text"],)),
        "audio": Unless(),
        "web_search_options": Unless(),
        "mm_processor_kwargs": Unless(({},)),
        "prompt_embeds": Unless(([],)),
        "logits_processors": Unless(([],), "pass them to LLM.generate in Python"),
        "logprob_token_ids": Unless(([],)),
        "return_tokens_as_token_ids": Unless((False,), "give return_token_ids"),
        "return_prompt_text": Unless((False,)),
        "routed_experts_prompt_start": Unless((0,)),
        "detokenize": Unless((True,), "give return_token_ids"),
        "spaces_between_special_tokens": Unless((True,)),
        "structural_tag": Unless(),
        "guided_whitespace_pattern": Unless((), BLANKS),
        "kv_transfer_params": Unless(({},)),
        "ec_transfer_params": Unless(({},)),
        "vllm_xargs": Unless(({},)),
        "chat_template": Unless((), "the operator chooses the template"),
    },
)
"""Fields that neither endpoint honours."""
NotInChats = _model(
    "NotInChats",
    {
        "prompt": Unless((), COMPLETIONS),
        "echo": Unless((False,), COMPLETIONS),
        "best_of": Unless((1,), "give n"),
        "add_special_tokens": Unless((False,), "the chat template adds them"),
    },
)
"""Fields that only completions honour."""
NotInCompletions = _model(
    "NotInCompletions",
    {
        "messages": Unless((), CHATS),
        "tools": Unless(([],), CHATS),
        "tool_choice": Unless(("none", "auto"), CHATS),
        "parallel_tool_calls": Unless((True, False), CHATS),
        "top_logprobs": Unless((0,), "give logprobs"),
        "add_generation_prompt": Unless((True, False), CHATS),
        "continue_final_message": Unless((False,), CHATS),
        "documents": Unless(([],), CHATS),
        "reasoning_effort": Unless(("none",), CHATS),
        "chat_template_kwargs": Unless(({},), CHATS),
    },
)
"""Fields that only chats honour."""
