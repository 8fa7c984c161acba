"""Options of chat templates, as clients send them."""

import re
from typing import Any

from .errors import Refusal
from .protocol import Templated

TEMPLATE_OWN = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
        "documents", "kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask",
        "return_dict", "return_tensors", "sanitize_control_tokens", "self", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""Names that clients may not give in ``chat_template_kwargs``.

They are "messages" and the parameters of transformers' ``apply_chat_template``.
"""


def template_options(body: Templated, template: str) -> dict[str, Any]:
    """Return what the chat template gets besides messages and tools.

    Raises Refusal: options contradict each other, or the template does not read one.
    """
    options = dict(body.chat_template_kwargs or {})
    wrong = TEMPLATE_OWN.intersection(options)
    if wrong:
        raise Refusal(f"{min(wrong)} is not for the template.", "chat_template_kwargs")
    if body.documents:
        if not _reads(template, "documents"):
            raise Refusal(
                "the chat template of this model reads no documents; put them into a message.",
                "documents",
            )
        options["documents"] = body.documents
    effort = body.reasoning_effort
    if effort is not None:
        values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        supported = {n: v for n, v in values.items() if _reads(template, n)}
        if not supported and effort != "none":
            raise Refusal(
                "the chat template of this model reads no reasoning_effort; leave it out.",
                "reasoning_effort",
            )
        options = supported | options
    if body.continue_final_message:
        options["continue_final_message"] = True
    return options


def wants_generation_prompt(body: Templated) -> bool:
    """Return whether the prompt ends with the beginning of a new message.

    Raises Refusal: the last message shall be continued as well.
    """
    if not body.continue_final_message:
        return body.add_generation_prompt
    if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise Refusal(
            "add_generation_prompt and continue_final_message exclude each other; give one.",
            "continue_final_message",
        )
    return False


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None
