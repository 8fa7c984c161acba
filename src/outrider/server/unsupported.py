"""Fields of OpenAI's, vLLM's and SGLang's requests that this server does not honour.

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
    "service_tier", "session_id", "stream_interval", "user",
)  # fmt: skip
"""Fields that change neither the prompt nor the output."""


@dataclass(frozen=True, eq=False)  # typing merges equal annotations, and 1 equals True
class Unless:
    """Refuses every value of a field but null and the ``neutral`` ones, which ask for nothing."""

    neutral: tuple[Any, ...] = ()
    remedy: str = "leave it out"

    def check(self, value: Any) -> None:
        """Refuse a value that asks for something."""
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


def _model(name: str, *rows: tuple[str, Unless]) -> Any:
    """Return a pydantic model with the fields that are named in each row."""
    marks = {field: mark for names, mark in rows for field in names.split()}
    return create_model(name, **{n: (Annotated[Any, mark], None) for n, mark in marks.items()})  # type: ignore[call-overload]


Unsupported = _model(
    "Unsupported",
    ("use_beam_search early_stopping watermarking return_prompt_text", Unless((False,))),
    ("spaces_between_special_tokens", Unless((True,))),
    ("stop_regex custom_logit_processor lora_path", Unless()),
    ("return_hidden_states", Unless((False,))),
    ("repetition_detection audio web_search_options structural_tag", Unless()),
    ("mm_processor_kwargs kv_transfer_params ec_transfer_params vllm_xargs", Unless(({},))),
    ("prompt_embeds logprob_token_ids", Unless(([],))),
    ("length_penalty", Unless((1,))),
    ("suffix", Unless(("",))),
    ("routed_experts_prompt_start", Unless((0,))),
    ("verbosity", Unless(("medium",))),
    ("modalities", Unless((["text"],))),
    ("thinking reasoning enable_thinking thinking_budget", Unless((), TEMPLATE)),
    ("functions", Unless(([],), TOOLS)),
    ("function_call", Unless(("none",), TOOLS)),
    ("logits_processors", Unless(([],), "pass them to LLM.generate in Python")),
    ("detokenize", Unless((True,), "give return_token_ids")),
    ("guided_whitespace_pattern", Unless((), BLANKS)),
    ("chat_template", Unless((), "the operator chooses the template")),
)
"""Fields that neither endpoint honours."""
NotInChats = _model(
    "NotInChats",
    ("prompt", Unless((), COMPLETIONS)),
    ("best_of", Unless((1,), "give n")),
    ("add_special_tokens", Unless((False,), "the chat template adds them")),
)
"""Fields that only completions honour."""
NotInCompletions = _model(
    "NotInCompletions",
    ("messages", Unless((), CHATS)),
    ("tools documents", Unless(([],), CHATS)),
    ("tool_choice", Unless(("none", "auto"), CHATS)),
    ("parallel_tool_calls add_generation_prompt", Unless((True, False), CHATS)),
    ("top_logprobs", Unless((0,), "give logprobs")),
    ("continue_final_message", Unless((False,), CHATS)),
    ("reasoning_effort", Unless(("none",), CHATS)),
    ("include_reasoning", Unless((True, False), CHATS)),
    ("thinking_token_budget", Unless((-1,), CHATS)),
    ("chat_template_kwargs", Unless(({},), CHATS)),
)
"""Fields that only chats honour."""
