"""Encodes and decodes texts at a bounded cost, long ones outside the event loop."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ..base.types import check_vocabulary
from ..frontend.inputs import InputProcessor
from ..text.codec import has_lone_surrogates
from .errors import Refusal
from .protocol import Templated, Tool

T = TypeVar("T")
LONG_TEXT = 1 << 14
"""Texts of this many characters or more are tokenised in a thread; other calls go on."""
SURE_TEXT = 1 << 18
"""Texts of more bytes are checked against the context before they are tokenised whole."""
SLOW_THREADS = 2
"""Threads for long texts; more of them would take more memory at a time."""
TEMPLATE_OWN = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation",
        "documents", "kwargs", "max_length", "messages", "padding", "return_assistant_tokens_mask",
        "return_dict", "return_tensors", "sanitize_control_tokens", "self", "tokenize",
        "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""Names that ``chat_template_kwargs`` may not set: parameters of transformers' own renderer."""


class Texts:
    """Encodes and decodes for the calls of a server."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs
        self._threads = ThreadPoolExecutor(SLOW_THREADS, "outrider-texts")

    async def slow(self, work: Callable[[], T]) -> T:
        """Return ``work()``, run in one of a few threads, to bound the memory of many at once."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def ids(self, prompt: str | list[int], special: bool = True) -> list[int]:
        """Return a prompt's token ids."""
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) < LONG_TEXT:
            return self._inputs.encode(prompt, special)
        return await self.slow(partial(self._encode, prompt, special))

    def _encode(self, text: str, special: bool, rendered: bool = False) -> list[int]:
        """Return the token ids of a text; refuse early a text that is longer than the context."""
        codec, most = self._inputs.codec, self._inputs.max_model_len
        long = not has_lone_surrogates(text) and len(text.encode()) > SURE_TEXT
        if long and codec is not None and codec.exceeds(text, most):
            raise Refusal(
                f"the text has {len(text)} characters, more than a context of {most} tokens holds; "
                "shorten it.", "prompt",
            )  # fmt: skip
        return self._inputs.encode(text, special, rendered)

    async def chat_ids(
        self, messages: list[dict[str, Any]], tools: list[Tool], body: Templated, long: bool
    ) -> tuple[list[int], str]:
        """Return a conversation's token ids and text, made in a thread where it is ``long``."""
        codec = self._inputs.codec
        templates = "".join(codec.templates.values()) if codec else ""
        options = template_options(body, templates)
        listed = [tool.model_dump(exclude_none=True) for tool in tools]

        def work() -> tuple[list[int], str]:
            text = self._inputs.render(messages, tools=listed, **options)
            return self._encode(text, False, rendered=True), text

        return await self.slow(work) if long else work()

    async def decode(self, ids: list[int]) -> str:
        """Return the text of token ids of the vocabulary, as many as the context holds."""
        most = self._inputs.max_model_len
        if len(ids) > most:
            raise Refusal(f"there are {len(ids)} tokens; give at most {most}.", "tokens")
        check_vocabulary("tokens", ids, self._inputs.vocab_size, "tokens")
        return await self.slow(partial(self._inputs.outputs.decode, ids))


def template_options(body: Templated, template: str) -> dict[str, Any]:
    """Return the options for the chat template; refuse one that it does not read."""
    options = dict(body.chat_template_kwargs or {})
    wrong = TEMPLATE_OWN.intersection(options)
    if wrong:
        raise Refusal(f"{min(wrong)} is not an option of the template.", "chat_template_kwargs")
    reads_none = "the chat template of this model does not read"
    if body.documents:
        if not _reads(template, "documents"):
            raise Refusal(f"{reads_none} documents; put them into a message.", "documents")
        options["documents"] = body.documents
    effort = body.reasoning_effort
    if effort is not None:
        values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        supported = {n: v for n, v in values.items() if _reads(template, n)}
        if not supported and effort != "none":
            raise Refusal(f"{reads_none} reasoning_effort; leave it out.", "reasoning_effort")
        options = supported | options
    options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
            raise Refusal(
                "add_generation_prompt and continue_final_message cannot be combined; give one.",
                "continue_final_message",
            )
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    return options


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None
