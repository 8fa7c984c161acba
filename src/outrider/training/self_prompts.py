"""Lets a chat model write prompts itself: it continues the text before a user's words.

Xu et al., "Magpie: Alignment data synthesis from scratch by prompting aligned LLMs with nothing",
2024. A third are about code, half of these without a template, as editors send them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..base.types import SamplingParams
from ..bench.workload import Item
from ..errors import ConfigError, RequestError
from ..llm import LLM

PLACE = "\ufdd2"
"""Placeholder for a user's words; a noncharacter, which Unicode reserves for programs."""
BLOCK = 256
TOKENS = 160
"""Most tokens of a prompt; longer ones are left out."""
CODE_TOKENS = 64
"""Most tokens of a prompt about code; longer ones are cut."""
LEAST = 12
"""Fewest characters of a prompt."""


class Opening(NamedTuple):
    """The words that a prompt begins with; those of a ``raw`` one are not put into the template."""

    words: str = ""
    code: bool = False
    raw: bool = False

    def prompt(self, text: str, ended: bool) -> Item | None:
        """Return the prompt that the target completed with ``text``, None if it is unusable."""
        whole = self.words + text
        if not (ended or self.code) or len(whole.strip()) < LEAST:
            return None
        if self.raw:
            return Item(whole)
        return Item(messages=({"role": "user", "content": whole.strip()},))


OPENINGS = (
    *[Opening()] * 12,
    Opening("Write a Python function that", code=True),
    Opening("Complete this Python function:\n```python\ndef", code=True),
    Opening("Explain what this code does:\n```", code=True),
    Opening("def", code=True, raw=True),
    Opening("import", code=True, raw=True),
    Opening("from typing import List\n\n\ndef", code=True, raw=True),
)
"""Openings, which prompts use in turn."""


def before_a_user(llm: LLM) -> str:
    """Return the text that the chat template puts before a user's words.

    Raises ConfigError: there is no template.
    """
    try:
        text = llm.inputs.render([{"role": "user", "content": PLACE}])
    except RequestError as error:
        raise ConfigError(
            f"the target cannot write prompts itself ({str(error).rstrip('.')}); give --prompts."
        ) from None
    return text.partition(PLACE)[0]


def write_prompts(
    llm: LLM, count: int, context: int, seed: int, told: Callable[[int, int], None],
    enough: Callable[[float], bool],
) -> list[Item]:  # fmt: skip
    """Return ``count`` different prompts that the target wrote; ``told`` gets the count so far.

    They leave room in the ``context``. Writing stops early if ``enough``, called with the tokens
    that the target has written for each prompt, is true. Raises ConfigError: hardly any are usable.
    """
    template, encode, codec = before_a_user(llm), llm.inputs.encode, llm.inputs.codec
    assert codec is not None  # it has written the template
    begun = [
        encode(o.words) if o.raw else encode(template + o.words, special=False, rendered=True)
        for o in OPENINGS
    ]
    found: dict[str, Item] = {}
    tried = tokens = 0
    while len(found) < count and not (found and enough(tokens / len(found))):
        if tried > 10 * (count + BLOCK):
            raise ConfigError(
                f"of {tried} prompts that the target wrote itself only {len(found)} are of use; "
                "give --prompts."
            )
        which = [n % len(OPENINGS) for n in range(tried, tried + BLOCK)]
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=min(CODE_TOKENS if OPENINGS[at].code else TOKENS, context // 2),
                seed=(seed << 40) + tried + i,
            )
            for i, at in enumerate(which)
        ]  # fmt: skip
        outputs = llm.generate([begun[at] for at in which], params)
        for at, output in zip(which, outputs, strict=True):
            answer = output.outputs[0]
            tokens += len(answer.token_ids)
            item = OPENINGS[at].prompt(answer.text, answer.finish_reason == "stop")
            if item is not None and len(item.encode(codec)) < context:
                found.setdefault(answer.text, item)
        tried += BLOCK
        told(min(len(found), count), count)
    return [*found.values()][:count]
