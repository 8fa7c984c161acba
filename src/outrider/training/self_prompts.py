"""Prompts that a chat model writes itself: it is given what stands before a user's words.

Xu et al., "Magpie: Alignment data synthesis from scratch by prompting aligned LLMs with nothing",
2024.
"""

from __future__ import annotations

from collections.abc import Callable

from ..base.types import SamplingParams
from ..bench.workload import Item
from ..errors import ConfigError, RequestError
from ..llm import LLM

PLACE = "\ufdd2"
"""Stands for a user's words; a noncharacter, which Unicode keeps for programs."""
BLOCK = 256
TOKENS = 160
"""Tokens of a prompt at most; what is longer is left out."""
LEAST = 12
"""Characters of a prompt at least."""


def before_a_user(llm: LLM) -> str:
    """Return what the chat template writes before a user's words.

    Raises ConfigError: there is no template.
    """
    try:
        text = llm.inputs.render([{"role": "user", "content": PLACE}])
    except RequestError as error:
        raise ConfigError(
            f"the target cannot write prompts itself ({str(error).rstrip('.')}); give --prompts."
        ) from None
    return text.partition(PLACE)[0]


def write_prompts(llm: LLM, count: int, seed: int, told: Callable[[int, int], None]) -> list[Item]:
    """Return ``count`` different prompts that the target wrote; ``told`` gets how many there are.

    Raises ConfigError: it hardly writes any.
    """
    asked = llm.inputs.encode(before_a_user(llm), special=False, rendered=True)
    found: dict[str, None] = {}
    tried = 0
    while len(found) < count:
        if tried > 10 * (count + BLOCK):
            raise ConfigError(
                f"of {tried} prompts that the target wrote itself only {len(found)} are of use; "
                "give --prompts."
            )
        params = [
            SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=(seed << 40) + tried + i)
            for i in range(BLOCK)
        ]
        for output in llm.generate([asked] * BLOCK, params):
            answer = output.outputs[0]
            text = answer.text.strip()
            if answer.finish_reason == "stop" and len(text) >= LEAST:
                found[text] = None
        tried += BLOCK
        told(min(len(found), count), count)
    return [Item(messages=({"role": "user", "content": text},)) for text in [*found][:count]]
